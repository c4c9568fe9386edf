import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from tidewheel.cli.usage import DEFAULT_URL, UsageError, within

if TYPE_CHECKING:
    from tidewheel.top.watch import ServerWatch
    from tidewheel_client.server_pages import ServerPages

KEY_VARIABLE = "TIDEWHEEL_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument(
        "--url", help="a server, whose metrics are on port 8002 and readiness on 8003 of its host (default: the one "
        f"that this user serves on this machine, else {DEFAULT_URL})",
    )  # fmt: skip
    where.add_argument("--metrics-url", metavar="URL", help="its metrics, if elsewhere: http://HOST:PORT/metrics")
    where.add_argument("--health-url", metavar="URL", help="its readiness, if elsewhere: http://HOST:PORT/ready")
    where.add_argument(
        "--gateway-url", default="", metavar="URL", help="metrics of a gateway, whose errors are shown too: "
        f"http://HOST:PORT/metrics; ${KEY_VARIABLE} is the key if it wants one",
    )  # fmt: skip
    where.add_argument("--model", default="", metavar="NAME", help="figures of one model (default: sums over all)")
    how = parser.add_argument_group("how")
    text = "time between two looks (default: %(default)g)"
    interval = within(float, "time between looks", 0.2, 60, " seconds")
    how.add_argument("--interval-s", type=interval, default=1.0, metavar="S", help=text)
    once = how.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="look twice, print as text and end; needs no terminal")
    once.add_argument("--json", action="store_true", help="the same as JSON")


def run(args: argparse.Namespace) -> int:
    from tidewheel.top.watch import ServerWatch

    key = os.environ.get(KEY_VARIABLE, "")
    watch = ServerWatch(_pages(args), args.model, gateway_url=args.gateway_url, api_key=key)
    if args.once or args.json:
        return _print_once(watch, args.interval_s, as_json=args.json)
    return _show(watch, args.interval_s)


def _pages(args: argparse.Namespace) -> "ServerPages":
    from tidewheel.server import workdir
    from tidewheel.server.console import top_command
    from tidewheel_client.server_pages import ServerPages

    is_named = args.url is not None or args.metrics_url is not None
    if not is_named and (found := [endpoints for _, endpoints in workdir.running_servers()]):
        if len(found) > 1:
            raise UsageError("\n  ".join(["several servers of this user live; name one:", *map(top_command, found)]))
        return ServerPages(
            found[0].authority(found[0].grpc), found[0].metrics_url, args.health_url or found[0].ready_url
        )
    return ServerPages(args.url or DEFAULT_URL, args.metrics_url, args.health_url)


def _print_once(watch: "ServerWatch", interval_s: float, *, as_json: bool) -> int:
    import msgspec

    from tidewheel.top.view_text import as_text

    watch.look()
    time.sleep(interval_s)
    view = watch.look()
    print(msgspec.json.format(msgspec.json.encode(view)).decode() if as_json else as_text(view))
    return 0


def _show(watch: "ServerWatch", interval_s: float) -> int:
    try:
        from tidewheel.top.terminal_app import TerminalApp
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the package {error.name} is not installed: pip install 'tidewheel[top]', or use --once or --json"
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this is no terminal: use --once or --json")
    app = TerminalApp(watch, interval_s, watch.look())
    app.run()
    return int(app.return_code or 0)
