"""Run the gateway until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.spoken import Reasoning
from tidewheel.gateway.upstreams import Address, Upstreams
from tidewheel.server import ServeError, processes
from tidewheel.server.endpoints import check_keys

_KEEPALIVE_S = 75.0  # for an idle connection
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    upstreams: Sequence[Address]
    host: str = "127.0.0.1"
    port: int = 0
    api_keys: Path | None = None
    max_body_mb: int = 16
    drain_s: float = 30.0
    reasoning: Reasoning = "tagged"


def serve_gateway(options: GatewayOptions) -> int:
    """Return the exit code. Raise `ServeError` or `ConfigError` if it cannot start."""
    check_keys(options.host, options.api_keys)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # malformed requests are answered, not logged
    processes.raise_descriptor_limit()
    gateway = Gateway(
        Upstreams(options.upstreams),
        ApiKeys(options.api_keys),
        max_body_bytes=options.max_body_mb << 20,
        reasoning=options.reasoning,
    )
    asyncio.run(_serve(gateway, options))
    return 0


async def _serve(gateway: Gateway, options: GatewayOptions) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP:
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(
        gateway.application(),
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=options.drain_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            raise ServeError(f"cannot listen on {options.host} port {options.port}: {error.strerror}") from None
        host, port = runner.addresses[0][:2]
        print(f"OpenAI API at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)  # noqa: T201
        await stopped.wait()
    finally:
        # A second signal ends the wait for open requests.
        with contextlib.suppress(asyncio.CancelledError):
            await _clean_up(runner, loop)


async def _clean_up(runner: web.AppRunner, loop: asyncio.AbstractEventLoop) -> None:
    task = asyncio.ensure_future(runner.cleanup())
    for number in _STOP:
        loop.add_signal_handler(number, task.cancel)
    await task
