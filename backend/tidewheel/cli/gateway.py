import argparse
import re
from collections import Counter

from tidewheel.cli.usage import UsageError, fields_of, within
from tidewheel.gateway import ADDRESS_FORM, MAX_BODY_MB

DEFAULT_UPSTREAM = "127.0.0.1:8001,metrics=8002,health=8003,http=8000"
WORKERS_HELP = "processes that share the port, for more streams than one core serves (default: %(default)s)"
workers = within(int, "number of processes", 1, 64)
port = within(int, "port", 0, 65535)
_ORIGIN = re.compile(
    r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?"
)
drain_s = within(float, "time in seconds", 0, 86_400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "gRPC endpoint of a server, and its ports of metrics, readiness and HTTP (for /v2/models/…/generate); "
        "several are balanced; with dns:, every address that the name has is a server, asked for again every 2 s; "
        "those of the least cost are preferred while they have room (default of cost: 0; docs/openai.md) "
        f"(default: {DEFAULT_UPSTREAM})"
    )
    parser.add_argument("--url", action="append", metavar=ADDRESS_FORM, help=text)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    text = "0 takes a free one (default: %(default)s)"
    parser.add_argument("--port", type=port, default=8080, metavar="N", help=text)
    parser.add_argument("--workers", type=workers, default=1, metavar="N", help=WORKERS_HELP)
    add_shared_options(parser)
    text = "seconds that open requests may go on after Ctrl-C or SIGTERM (default: %(default)g)"
    parser.add_argument("--drain-s", type=drain_s, default=30.0, metavar="S", help=text)


def add_shared_options(group: argparse._ActionsContainer) -> None:
    """Add options that `tidewheel serve` has too."""
    text = "TOML file of the API keys that are let in; without one, only loopback is listened on (docs/openai.md)"
    group.add_argument("--api-keys", type=_key_file, metavar="FILE", help=text)
    text = (
        "what of an answer is reasoning_content: tagged, up to </think> where it begins with <think> (default); "
        "always, up to </think>, for templates that write the tag themselves; off, nothing"
    )
    group.add_argument("--reasoning", choices=("tagged", "always", "off"), help=text)
    text = "/metrics needs no API key, for scrapers that can send none: where only they and yours reach the port"
    group.add_argument("--open-metrics", action="store_true", help=text)
    text = "serve a page at /playground to try the models in a browser"
    group.add_argument("--playground", action="store_true", help=text)
    text = "let web pages of this origin ask, as https://app.example (repeatable); '*' lets all pages (default: none)"
    group.add_argument("--cors-origin", type=_origin, action="append", metavar="ORIGIN", help=text)
    text = f"largest body of a request (default: {MAX_BODY_MB})"
    group.add_argument("--max-body-mb", type=within(int, "number of megabytes", 1, 1024), metavar="MB", help=text)


def _origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        form = "SCHEME://HOST[:PORT] as browsers send it: in lower case, no path, no default port"
        raise argparse.ArgumentTypeError(f"{text!r} is no origin: write {form}, or * for all")
    return text


def _key_file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of the file is empty")
    return text


def run(args: argparse.Namespace) -> int:
    from tidewheel.gateway.gateway_options import Address, StandaloneOptions
    from tidewheel.gateway.run_gateway import serve_gateway

    try:
        upstreams = tuple(Address.parse(url) for url in args.url or [DEFAULT_UPSTREAM])
    except ValueError as error:
        raise UsageError(f"--url {error}") from None
    ((server, num_forms), *_) = Counter(one.grpc for one in set(upstreams)).most_common(1)
    if num_forms > 1:
        raise UsageError(f"--url {server} is given in {num_forms} forms: name each server once")
    return serve_gateway(StandaloneOptions(upstreams=upstreams, **fields_of(args, StandaloneOptions)))
