import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.gateway import add_shared_options
from tidewheel.cli.serve import default_repository
from tidewheel.cli.usage import fields_of

if TYPE_CHECKING:
    from tidewheel.cluster.cluster_settings import ClusterSettings
    from tidewheel.cluster.control import ClusterFolder, ClusterStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    _add_up(actions.add_parser("up", help="start replicas on Ray Serve, and a gateway in front of them"))
    actions.add_parser("status", help="say how many replicas serve")
    scale = actions.add_parser("scale", help="change the number of replicas; one that goes lets its streams end")
    scale.add_argument("replicas", type=int, metavar="N")
    actions.add_parser("down", help="end it; nothing is left")


def _add_up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "number of replicas; N:M follows the load between both, and 0:M has none while nothing is asked"
    add("--replicas", type=_numbers, default=(1, 0), metavar="N[:M]", help=f"{text} (default: 1)")
    text = "policy for N:M: reactive or predictive (default: %(default)s)"
    add("--scaling", default="reactive", metavar="NAME", help=text)
    text = "a setting of the policy, as scale_down_after_s=300 (repeatable)"
    add("--scaling-set", action="append", default=[], type=_setting, metavar="KEY=NUMBER", help=text)
    text = "a Triton model repository (default: the folder model_repository)"
    add("--model-repository", type=Path, metavar="DIR", help=text)
    add("--models", default="", metavar="NAME[,NAME...]", help="entries of the repository to serve (default: all)")
    add("--model", default="", metavar="PATH_OR_HF_ID", help="a model in place of a repository")
    add("--host", default="127.0.0.1", help="address of the gateway (default: %(default)s)")
    text = "0 takes a free one (default: %(default)s)"
    add("--openai-port", dest="port", type=int, default=8080, metavar="N", help=text)
    add_shared_options(parser)
    text = "how a replica is chosen: prefix-aware, session-affinity, least-loaded or round-robin"
    add("--router", default="prefix-aware", metavar="NAME", help=f"{text} (default: %(default)s)")
    text = "cores of each replica (default: %(default)g)"
    add("--replica-cpus", type=float, default=1.0, metavar="X", help=text)
    add("--replica-gpus", type=float, metavar="X", help="GPUs of each (default: 1 if its entry runs on one, else 0)")
    text = "one more option of tidewheel serve, as --serve-arg=--no-restart (repeatable)"
    add("--serve-arg", dest="serve_arguments", action="append", default=[], metavar="ARG", help=text)
    text = "seconds that a request waits for a replica, if there is none (default: %(default)g)"
    add("--patience-s", type=float, default=30.0, metavar="S", help=text)
    text = "seconds that open requests may go on after tidewheel cluster down (default: %(default)g)"
    add("--drain-s", type=float, default=30.0, metavar="S", help=text)


def run(args: argparse.Namespace) -> int:
    from tidewheel.cluster import control

    folder = control.ClusterFolder.here()
    match args.action:
        case "up":
            print(_where(args, _up(args), folder))
        case "status":
            _show(control.status(folder))
        case "scale":
            _show(control.scale(folder, args.replicas))
        case "down":
            control.down(folder)
            print("the cluster is down")
    return 0


def _up(args: argparse.Namespace) -> int:
    from tidewheel.cluster import control
    from tidewheel.server.console import Console, waiting

    stages, console = ["starting the cluster"], Console(verbose=False)

    def note(text: str) -> None:
        stages.append(text)
        console.note(text)

    with waiting(lambda: stages[-1]):
        return control.up(_settings(args), note)


def _where(args: argparse.Namespace, port: int, folder: "ClusterFolder") -> str:
    from tidewheel.server.console import top_command
    from tidewheel.server.workdir import running_servers

    url = f"http://{args.host}:{port}"
    servers = running_servers(folder.run)
    lines = [f"OpenAI API at {url}/v1"] + [f"playground at {url}/playground"] * args.playground
    tops = [f"{top_command(one)} --gateway-url {url}/metrics" for _, one in servers]
    return "\n".join([*lines, *(f"Watch it: {top}" for top in tops), "tidewheel cluster status | scale N | down"])


def _settings(args: argparse.Namespace) -> "ClusterSettings":
    from tidewheel.cluster.cluster_settings import ClusterSettings

    repository = args.model_repository or (None if args.model else default_repository())
    others = {
        "model_repository": "" if repository is None else str(repository.resolve()),
        "models": [name for name in args.models.split(",") if name],
        "model": str(Path(args.model).resolve()) if args.model and Path(args.model).exists() else args.model,
        "replicas": args.replicas[0],
        "max_replicas": args.replicas[1],
        "scaling_settings": dict(args.scaling_set),
        "api_keys": str(Path(args.api_keys).resolve()) if args.api_keys else "",
    }
    return ClusterSettings(**(fields_of(args, ClusterSettings) | others))


def _numbers(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas: write N or N:M")
    return int(least), int(most or 0)


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, int(value) if value.isdecimal() else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: write KEY=NUMBER") from None


def _show(status: "ClusterStatus") -> None:
    states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(status.replicas.items()) if count)
    print(f"{status.state.lower()}: {status.wanted} replicas wanted, {states or 'none yet'}")
    if status.message:
        print(status.message)
    print(f"OpenAI API at port {status.port}")
    for authority, figures in sorted(status.figures.items()):
        print(f"  {authority}: {_condition(figures)}" if figures else f"  {authority}: it has told nothing yet")


def _condition(figures: dict[str, float]) -> str:
    from tidewheel.cluster.ray_scaling import queue_s

    state = "ready" if figures["is_ready"] else "not ready"
    age = timedelta(seconds=int(figures["age_s"]))
    life = f"{state}, up {age}, restarts {figures['restarts']:.0f}"
    waits = [f"{priority.name} for {age:.1f} s" for priority, age in queue_s(figures).items() if age]
    oldest = f" (the oldest {', '.join(waits)})" if waits else ""
    cache = f"{figures['kv_use']:.0%} of its cache in use"
    return f"{life}; {figures['running']:.0f} running, {figures['waiting']:.0f} waiting{oldest}, {cache}"
