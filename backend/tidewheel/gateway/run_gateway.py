"""Program of the gateway, and of each of several workers.

python -m tidewheel.gateway.run_gateway OPTIONS [FOLDER INDEX]      options are JSON; a folder makes it a worker
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

import msgspec

from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.errors import ConfigError
from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.client_connections import HttpListener
from tidewheel.gateway.gateway_options import GatewayOptions, StandaloneOptions, announce
from tidewheel.gateway.upstreams import Upstreams
from tidewheel.gateway.workers import GatewayWorker, serve_workers
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys
from tidewheel_process.restarts import CrashLoop

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_gateway(options: StandaloneOptions) -> int:
    """Serve until a stop, and return the exit code. Raise `ServeError` or `ConfigError`."""
    check_keys(options.host, options.key_file)
    if options.workers > 1:
        ApiKeys(options.key_file)  # reports errors once
        return serve_workers(options)
    return serve_alone(options, GatewayWorker())


def serve_alone(options: StandaloneOptions, worker: GatewayWorker) -> int:
    """Serve in this process until a stop. Raise `ServeError` or `ConfigError`."""
    protect_texts()
    log_to_stderr(logging.WARNING)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # malformed requests are answered, not logged
    keys = ApiKeys(options.key_file, worker.ledger())
    gateway = Gateway(Upstreams(options.upstreams), keys, options, worker)
    asyncio.run(_serve(gateway, options, shares_port=worker.folder is not None))
    return 0


async def _serve(gateway: Gateway, options: GatewayOptions, *, shares_port: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP:
        loop.add_signal_handler(number, stopped.set)
    listener = await HttpListener.open(
        gateway.application(), options.host, options.port, options.drain_s, shares_port=shares_port
    )
    try:
        if not shares_port:
            announce(*listener.addresses[0][:2])
        gateway.publish()
        await stopped.wait()
    finally:
        # A second signal ends the wait for open requests.
        with contextlib.suppress(asyncio.CancelledError):
            await _clean_up(listener, loop)


async def _clean_up(listener: HttpListener, loop: asyncio.AbstractEventLoop) -> None:
    task = asyncio.ensure_future(listener.cleanup())
    for number in _STOP:
        loop.add_signal_handler(number, task.cancel)
    await task


def main(text: str, folder: str = "", index: str = "0") -> int:
    options = msgspec.json.decode(text, type=StandaloneOptions)
    try:
        if folder:
            return serve_alone(options, GatewayWorker(Path(folder), int(index), options.workers))
        return serve_gateway(options)
    except (ServeError, ConfigError, CrashLoop) as error:
        print(f"tidewheel: error: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
