"""`tidewheel gateway`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidewheel.gateway import MAX_BODY_MB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        action="append",
        metavar="[dns:]HOST:PORT[,metrics=PORT][,health=PORT][,http=PORT]",
        help="gRPC endpoint of a server, and its ports of metrics, readiness and HTTP (for /v2/models/…/generate); "
        "several are balanced; with dns:, "
        "every address that the name has is a server, asked for again every 2 s "
        "(default: 127.0.0.1:8001,metrics=8002,health=8003,http=8000)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8080, metavar="N", help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--workers", type=workers, default=1, metavar="N", help=WORKERS_HELP)
    add_shared_options(parser)
    parser.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that open requests may go on after Ctrl-C or SIGTERM (default: %(default)g)",
    )


WORKERS_HELP = "processes that share the port, for more streams than one core serves (default: %(default)s)"


def workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: 1 to 64")
    return int(text)


def _body_mb(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of megabytes: 1 to 1024")
    return int(text)


def add_shared_options(group: argparse._ActionsContainer) -> None:
    """Add options that `tidewheel serve` has too."""
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="TOML file of the API keys that are let in; without one, only loopback is listened on (docs/openai.md)",
    )
    group.add_argument(
        "--reasoning",
        choices=("tagged", "always", "off"),
        help="what of an answer is reasoning_content: tagged, up to </think> where it begins with <think> (default); "
        "always, up to </think>, for templates that write the tag themselves; off, nothing",
    )
    group.add_argument(
        "--open-metrics",
        action="store_true",
        help="/metrics needs no API key, for scrapers that can send none: where only they and yours reach the port",
    )
    group.add_argument(
        "--playground", action="store_true", help="serve a page at /playground to try the models in a browser"
    )
    group.add_argument(
        "--max-body-mb", type=_body_mb, metavar="MB", help=f"largest body of a request (default: {MAX_BODY_MB})"
    )


def run(args: argparse.Namespace) -> int:
    from tidewheel.cli.usage import UsageError
    from tidewheel.gateway.gateway_options import Address, StandaloneOptions
    from tidewheel.gateway.run_gateway import serve_gateway

    if not 0 <= args.port < 65536 or not 0 <= args.drain_s <= 86_400:
        raise UsageError("--port must be 0 to 65535, and --drain-s 0 to 86400")
    try:
        upstreams = [Address.parse(url) for url in args.url or ["127.0.0.1:8001,metrics=8002,health=8003,http=8000"]]
    except ValueError as error:
        raise UsageError(f"--url {error}") from None
    return serve_gateway(
        StandaloneOptions(
            upstreams=tuple(upstreams),
            host=args.host,
            port=args.port,
            api_keys=str(args.api_keys or ""),
            max_body_mb=args.max_body_mb or MAX_BODY_MB,
            drain_s=args.drain_s,
            reasoning=args.reasoning or "tagged",
            workers=args.workers,
            open_metrics=args.open_metrics,
            playground=args.playground,
        )
    )
