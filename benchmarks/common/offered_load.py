"""Open-loop load on a served model, by the driver of `tidewheel bench`. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tidewheel.bench.driver import LoadDriver, RunLimits, RunProgress
from tidewheel.bench.outcome import OfferedRequest, RequestOutcome
from tidewheel.bench.transports.triton_grpc import TritonGrpcTransport

TIMEOUT_S = 300.0


def run(
    address: str, model: str, load: Sequence[OfferedRequest], ready: Callable[[], None] = lambda: None
) -> list[RequestOutcome]:
    """Connect, call `ready`, then send each request at its time."""
    return asyncio.run(_run(address, model, load, ready))


async def _run(
    address: str, model: str, load: Sequence[OfferedRequest], ready: Callable[[], None]
) -> list[RequestOutcome]:
    transport, progress = TritonGrpcTransport(address, model), RunProgress()
    await transport.open()
    try:
        ready()
        driver = LoadDriver(transport, RunLimits(seconds=0.0, timeout_s=TIMEOUT_S), progress)
        await driver.open_loop((offered,) for offered in load)
    finally:
        await transport.close()
    return progress.outcomes
