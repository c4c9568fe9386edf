import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.gateway import WORKERS_HELP, add_shared_options, drain_s, port, workers
from tidewheel.cli.usage import UsageError, fields_of, printable, within

if TYPE_CHECKING:
    from tidewheel.server.run_server import ServeOptions

DEFAULT_REPOSITORY = Path("model_repository")
_OF_THE_GATEWAY = (
    "api_keys", "openai_workers", "reasoning", "open_metrics", "playground", "cors_origin", "max_body_mb",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "without --model and --model-repository: the folder model_repository, if there is one"
    add = parser.add_argument_group("what to serve", text).add_argument
    text = "a folder in Hugging Face's format, a GGUF file, or an id (owner/name)"
    add("--model", metavar="PATH_OR_HF_ID", help=text)
    add("--model-repository", type=Path, metavar="DIR", help="a Triton model repository, a folder per model")
    text = "entries of the repository to serve (default: all)"
    add("--models", type=_names, default=(), metavar="NAME[,NAME...]", help=text)
    text = (
        "none: models stay as they are (default); explicit: tidewheel load, unload and reload change them, --models "
        "are loaded first; poll: changes of the repository are followed"
    )
    add("--model-control", choices=("none", "explicit", "poll"), help=text)
    text = "whole seconds between two looks at the repository, with --model-control poll (default: Triton's, 15)"
    add("--repository-poll-s", type=within(int, "time in whole seconds", 1, 86_400), metavar="S", help=text)
    add("--model-name", default="", metavar="NAME", help="serve --model as NAME (default: its own)")
    text = "an engine setting for --model, say dtype=float32 or max_num_seqs=64 (repeatable)"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    _add_where(parser.add_argument_group("where", "port 0 takes a free one"))
    _add_manner(parser.add_argument_group("how"))


def _add_where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, number in (("http", 8000), ("grpc", 8001), ("metrics", 8002), ("health", 8003)):
        add(f"--{name}-port", dest=name, type=port, default=number, metavar="N", help="default: %(default)s")
    text = "write address and ports to FILE as JSON once they are chosen, and remove it at the end"
    add("--ports-file", type=Path, metavar="FILE", help=text)
    text = "answer in OpenAI's API there too (default: do not)"
    add("--openai-port", dest="openai", type=port, metavar="N", help=text)
    add("--openai-workers", type=workers, default=1, metavar="N", help=WORKERS_HELP)
    add_shared_options(group)


def _add_manner(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "seconds that running requests may go on after Ctrl-C or SIGTERM (default: %(default)g)"
    add("--drain-s", type=drain_s, default=30.0, metavar="S", help=text)
    text = "stop, as after SIGTERM, when standard input ends: give it a pipe, and the server ends with its parent"
    add("--end-with-stdin", action="store_true", help=text)
    text = "end, with an exit code that is not 0, when tritonserver or a front end dies (default: start again)"
    add("--no-restart", dest="restart", action="store_false", help=text)
    apis = ("shared-memory", "trace", "logging", "model-repository")
    text = "open one of Triton's APIs that are closed otherwise (repeatable). All that reach it may then do harm"
    add("--open-api", dest="open_apis", action="append", choices=apis, default=[], help=f"{text}: docs/proxy.md")
    add("--tritonserver", metavar="PATH", help="the tritonserver to run (default: the first one found)")
    text = "one more argument for tritonserver, as --triton-arg=--log-verbose=1 (repeatable)"
    add("--triton-arg", dest="triton_arguments", action="append", default=[], metavar="ARG", help=text)
    text = "write all that tritonserver and its stubs print to FILE"
    add("--log-file", type=Path, metavar="FILE", help=text)
    text = "record scheduling decisions of --model in DIR, for tidewheel simulate and tune; no text, no tokens"
    add("--record", type=Path, metavar="DIR", help=text)
    add("--allow-faults", action="store_true", help="serve with TIDEWHEEL_FAULTS set: for tests")
    add("-v", "--verbose", action="store_true", help="show all that tritonserver and its stubs print")


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
    from tidewheel.entries.checking import check
    from tidewheel.errors import ConfigError

    with contextlib.suppress(ConfigError):  # it is no entry by now
        if errors := [found for found in check(entry).findings if found.severity == "error"]:
            lines = (printable(f"  {found.place}: {found.message}") for found in errors)
            print(f"tidewheel: tidewheel check {shlex.quote(str(entry))} finds:", *lines, sep="\n", file=sys.stderr)


def _options(args: argparse.Namespace) -> "ServeOptions":
    from tidewheel.gateway.gateway_options import StandaloneOptions
    from tidewheel.server.endpoints import Endpoints
    from tidewheel.server.run_server import ServeOptions

    _check(args)
    gateway = StandaloneOptions(workers=args.openai_workers, **fields_of(args, StandaloneOptions))
    is_needed = args.model is None and args.model_repository is None
    others = {
        "model_repository": default_repository() if is_needed else args.model_repository,
        "settings": _settings(args),
        "endpoints": Endpoints(**fields_of(args, Endpoints)),
        "gateway": gateway,
        "model_control": args.model_control or ("none" if args.repository_poll_s is None else "poll"),
    }
    return ServeOptions(**(fields_of(args, ServeOptions) | others))


def default_repository() -> Path:
    if not DEFAULT_REPOSITORY.is_dir():
        raise UsageError(f"nothing to serve: give --model or --model-repository (no {DEFAULT_REPOSITORY} here)")
    return DEFAULT_REPOSITORY


def _check(args: argparse.Namespace) -> None:
    if args.model is not None and args.model_repository is not None:
        raise UsageError("--model and --model-repository exclude each other")
    if args.model is not None and args.models:
        raise UsageError("--models chooses entries of a model repository: it does not go with --model")
    for name in _OF_THE_GATEWAY if args.openai is None else ():
        value = getattr(args, name)
        if value and (name != "openai_workers" or value > 1):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} goes with --openai-port: it is of the gateway, not of Triton's own ports")
    if args.model is None and args.record is not None:
        raise UsageError("--record goes with --model; in a repository, set record in config.pbtxt")
    if args.model is None and (args.set or args.model_name):
        raise UsageError("--set and --model-name go with --model; settings of a repository stand in its config.pbtxt")
    if args.repository_poll_s is not None and args.model_control not in (None, "poll"):
        raise UsageError(f"--repository-poll-s goes with --model-control poll, not with {args.model_control}")
    if "model-repository" in args.open_apis and args.model_control != "explicit":
        raise UsageError("--open-api model-repository goes with --model-control explicit: else Triton loads nothing")


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
