"""Program of the gateway, and of each of several workers.

python -m tidewheel.gateway.run_gateway OPTIONS [FOLDER INDEX]      options are JSON; a folder makes it a worker
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.errors import ConfigError
from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.client_connections import HttpListener
from tidewheel.gateway.counters import GatewayWorker
from tidewheel.gateway.gateway_options import GatewayOptions, StandaloneOptions, announce
from tidewheel.gateway.upstreams import Upstreams
from tidewheel.private_dir import run_dir
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys, free_port
from tidewheel_process.child import Child, CrashLoop, RestartedChild, StartError
from tidewheel_process.current_process import STOP_SIGNALS, StopSignals
from tidewheel_process.locked_folder import new_folder, remove_left_over

_START_S = 30.0
_LOOK_S = 0.1
_PREFIX = "gateway-"


def serve_gateway(options: StandaloneOptions, worker: GatewayWorker = GatewayWorker()) -> int:  # noqa: B008 - frozen
    """Serve until a stop, and return the exit code. Raise `ServeError` or `ConfigError`."""
    check_keys(options.host, options.api_keys)
    if options.workers > 1 and worker.folder is None:
        ApiKeys(options.api_keys)  # reports errors once
        return _serve_workers(options)
    protect_texts()
    log_to_stderr(logging.WARNING)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # malformed requests are answered, not logged
    keys = ApiKeys(options.api_keys, worker.ledger())
    gateway = Gateway(Upstreams(options.upstreams), keys, options, worker)
    asyncio.run(_serve(gateway, options, shares_port=worker.folder is not None))
    return 0


async def _serve(gateway: Gateway, options: GatewayOptions, *, shares_port: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    listener = await HttpListener.open(gateway.application(), options, shares_port=shares_port)
    try:
        if not shares_port:
            announce(*listener.addresses[0][:2])
        gateway.publish()
        await stopped.wait()
    finally:
        cleaning = asyncio.ensure_future(listener.cleanup())
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, cleaning.cancel)  # a second signal ends the wait for open requests
        with contextlib.suppress(asyncio.CancelledError):
            await cleaning


def _serve_workers(options: StandaloneOptions) -> int:
    """Serve by processes that share a port, restarted when they die. Raise `ServeError` or `CrashLoop`."""
    remove_left_over(base := run_dir(), _PREFIX)
    with StopSignals() as signals, _reserved(options.host, options.port) as port, new_folder(base, _PREFIX) as folder:
        command = msgspec.structs.replace(options, port=port).command
        children = [
            RestartedChild(
                f"worker {index} of the gateway",
                partial(Child, [*command, str(folder), str(index)], ends_with_parent=True),
                partial(print, file=sys.stderr, flush=True),
            )
            for index in range(options.workers)
        ]
        try:
            for index, one in enumerate(children):
                one.child.wait_ready(partial(_is_settled, GatewayWorker(folder, index), signals), _START_S)
            announce(options.host, port)
            num_passed_on = 0  # stop signals
            while not (num_passed_on and all(one.child.has_ended for one in children)):
                num_signals = signals.count  # may grow at any time
                for one in children:
                    if num_signals > num_passed_on:
                        one.child.terminate()
                    elif not num_signals:
                        one.watch()
                num_passed_on = num_signals
                time.sleep(_LOOK_S)
        except StartError:
            raise ServeError("a worker of the gateway could not start: its error is above") from None
        finally:
            for one in children:
                one.child.kill()
    return 0


def _is_settled(worker: GatewayWorker, signals: StopSignals) -> bool:
    return signals.count > 0 or worker.is_listening()


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    # SO_REUSEPORT: at a shared socket, the first worker to wake takes a whole burst.
    port = free_port(host, port, "--port")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        yield port


def main(text: str, folder: str = "", index: str = "0") -> int:
    options = msgspec.json.decode(text, type=StandaloneOptions)
    worker = GatewayWorker(Path(folder), int(index), options.workers) if folder else GatewayWorker()
    try:
        return serve_gateway(options, worker)
    except (ServeError, ConfigError, CrashLoop) as error:
        print(f"tidewheel: error: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
