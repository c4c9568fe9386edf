"""`tidewheel serve`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.gateway import WORKERS_HELP, add_shared_options, workers
from tidewheel.cli.usage import UsageError, printable
from tidewheel.gateway import MAX_BODY_MB

if TYPE_CHECKING:
    from tidewheel.server.run_server import ServeOptions

DEFAULT_REPOSITORY = Path("model_repository")
_OF_THE_GATEWAY = {
    "api_keys": "Triton's own ports know no keys",
    "openai_workers": "they are the gateway's",
    "reasoning": "only the gateway splits answers",
    "open_metrics": "they are the gateway's",
    "playground": "it is a page of the gateway",
    "max_body_mb": "it limits bodies that the gateway reads",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group(
        "what to serve", "without --model and --model-repository: the folder model_repository, if there is one"
    )
    what.add_argument(
        "--model", metavar="PATH_OR_HF_ID", help="a folder in Hugging Face's format, or an id (owner/name)"
    )
    what.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="a Triton model repository, a folder per model"
    )
    what.add_argument(
        "--models",
        type=_names,
        default=(),
        metavar="NAME[,NAME...]",
        help="entries of the repository to serve (default: all)",
    )
    _add_control(what)
    where = parser.add_argument_group("where", "port 0 takes a free one")
    where.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002), ("health", 8003)):
        where.add_argument(f"--{name}-port", type=_port, default=port, metavar="N", help="default: %(default)s")
    where.add_argument(
        "--ports-file",
        type=Path,
        metavar="FILE",
        help="write address and ports to FILE as JSON once they are chosen, and remove it at the end",
    )
    where.add_argument(
        "--openai-port", type=_port, metavar="N", help="answer in OpenAI's API there too (default: do not)"
    )
    where.add_argument("--openai-workers", type=workers, default=1, metavar="N", help=WORKERS_HELP)
    add_shared_options(where)
    _add_manner(parser.add_argument_group("how"))


def _add_manner(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests may go on after Ctrl-C or SIGTERM (default: %(default)g)",
    )
    how.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="stop, as after SIGTERM, when standard input ends: give it a pipe, and the server ends with its parent",
    )
    how.add_argument(
        "--no-restart",
        action="store_true",
        help="end, with an exit code that is not 0, when tritonserver or a front end dies (default: start again)",
    )
    how.add_argument(
        "--open-api",
        action="append",
        choices=("shared-memory", "trace", "logging", "model-repository"),
        default=[],
        help="open one of Triton's APIs that are closed otherwise (repeatable). All that reach it may then do harm: "
        "docs/proxy.md",
    )
    how.add_argument("--tritonserver", metavar="PATH", help="the tritonserver to run (default: the first one found)")
    how.add_argument(
        "--triton-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for tritonserver, as --triton-arg=--log-verbose=1 (repeatable)",
    )
    how.add_argument(
        "--log-file", type=Path, metavar="FILE", help="write all that tritonserver and its stubs print to FILE"
    )
    how.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="record scheduling decisions of --model in DIR, for tidewheel simulate; no text, no tokens",
    )
    how.add_argument("--allow-faults", action="store_true", help="serve with TIDEWHEEL_FAULTS set: for tests")
    how.add_argument("-v", "--verbose", action="store_true", help="show all that tritonserver and its stubs print")


def _add_control(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-control",
        choices=("none", "explicit", "poll"),
        help="none: models stay as they are (default); explicit: tidewheel load, unload and reload change them, "
        "--models are loaded first; poll: changes of the repository are followed",
    )
    group.add_argument(
        "--repository-poll-s",
        type=_poll_seconds,
        metavar="S",
        help="whole seconds between two looks at the repository, with --model-control poll (default: Triton's, 15)",
    )
    group.add_argument("--model-name", default="", metavar="NAME", help="serve --model as NAME (default: its own)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an engine setting for --model, say dtype=float32 or max_num_seqs=64 (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    from tidewheel.server import LoadError
    from tidewheel.server.run_server import serve

    try:
        return serve(options)
    except LoadError as error:
        if options.model_repository is not None:
            _print_mistakes(options.model_repository / error.model)
        raise


def _print_mistakes(entry: Path) -> None:
    """Print every error that `tidewheel check` finds in an entry; the failed load named only the first."""
    from tidewheel.cli.check import where
    from tidewheel.entries.checking import check
    from tidewheel.errors import ConfigError

    with contextlib.suppress(ConfigError):  # it is no entry by now
        if errors := [found for found in check(entry).findings if found.severity == "error"]:
            lines = (printable(f"  {where(found)}: {found.message}") for found in errors)
            print(f"tidewheel: tidewheel check {shlex.quote(str(entry))} finds:", *lines, sep="\n", file=sys.stderr)


def _options(args: argparse.Namespace) -> ServeOptions:
    from tidewheel.server.endpoints import Endpoints
    from tidewheel.server.run_server import ServeOptions

    model_repository = args.model_repository
    if args.model is not None and model_repository is not None:
        raise UsageError("--model and --model-repository exclude each other")
    if args.model is not None and args.models:
        raise UsageError("--models chooses entries of a model repository: it does not go with --model")
    _check_gateway(args)
    if args.model is None and args.record is not None:
        raise UsageError("--record goes with --model; in a repository, set record in config.pbtxt")
    if args.model is None and (args.set or args.model_name):
        raise UsageError("--set and --model-name go with --model; settings of a repository stand in its config.pbtxt")
    if args.repository_poll_s is not None and args.model_control not in (None, "poll"):
        raise UsageError(f"--repository-poll-s goes with --model-control poll, not with {args.model_control}")
    if "model-repository" in args.open_api and args.model_control != "explicit":
        raise UsageError("--open-api model-repository goes with --model-control explicit: else Triton loads nothing")
    if args.model is None and model_repository is None:
        if not DEFAULT_REPOSITORY.is_dir():
            raise UsageError(f"nothing to serve: give --model or --model-repository (no {DEFAULT_REPOSITORY} here)")
        model_repository = DEFAULT_REPOSITORY
    return ServeOptions(
        model_repository=model_repository,
        models=args.models,
        model=args.model,
        model_name=args.model_name,
        settings=_settings(args),
        endpoints=Endpoints(
            host=args.host,
            http=args.http_port,
            grpc=args.grpc_port,
            metrics=args.metrics_port,
            health=args.health_port,
            openai=args.openai_port,
        ),
        api_keys=args.api_keys,
        gateway_arguments=(
            f"--workers={args.openai_workers}",
            f"--reasoning={args.reasoning or 'tagged'}",
            f"--max-body-mb={args.max_body_mb or MAX_BODY_MB}",
            *(["--open-metrics"] if args.open_metrics else []),
            *(["--playground"] if args.playground else []),
        ),
        drain_s=args.drain_s,
        restart=not args.no_restart,
        model_control=args.model_control or ("none" if args.repository_poll_s is None else "poll"),
        repository_poll_s=args.repository_poll_s,
        open_apis=tuple(args.open_api),
        tritonserver=args.tritonserver,
        triton_arguments=tuple(args.triton_arg),
        log_file=args.log_file,
        ports_file=args.ports_file,
        end_with_stdin=args.end_with_stdin,
        allow_faults=args.allow_faults,
        verbose=args.verbose,
    )


def _check_gateway(args: argparse.Namespace) -> None:
    if args.openai_port is not None:
        return
    for name, reason in _OF_THE_GATEWAY.items():
        value = getattr(args, name)
        if value and (name != "openai_workers" or value > 1):
            raise UsageError(f"--{name.replace('_', '-')} goes with --openai-port: {reason}")


def _settings(args: argparse.Namespace) -> dict[str, str]:
    from tidewheel.server.repository import parse_settings

    settings = parse_settings(args.set)
    if args.record is None:
        return settings
    if "record" in settings:
        raise UsageError("--record and --set record=... say the same thing: give one")
    try:
        args.record.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--record is {str(args.record)!r}: it cannot be made a folder ({error.strerror})") from None
    return {**settings, "record": str(args.record.resolve())}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name: write NAME,NAME")
    return names


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _poll_seconds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in whole seconds: 1 to 86400")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds: 0 to 86400")
    return seconds
