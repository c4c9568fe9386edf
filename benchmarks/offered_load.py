"""Open-loop load on a served model, by the driver of `tidewheel bench`. Imports no torch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tidewheel.bench.driver import Driver, Limits, Progress
from tidewheel.bench.outcome import Offered, Outcome
from tidewheel.bench.transports.triton_grpc import TritonGrpc

TIMEOUT_S = 300.0
FIRST_ID, VOCAB = 4, 10_000


def offer(
    times: Iterable[float],
    mix: Sequence[tuple[float, dict[str, Any]]],
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rng: random.Random,
) -> list[Offered]:
    """Draw a request for each time: lengths from ranges, parameters from a mix of (share, parameters)."""
    shares = [share for share, _ in mix]
    return [
        Offered(
            at,
            [rng.randrange(FIRST_ID, VOCAB) for _ in range(rng.randint(*inputs))],
            rng.randint(*outputs),
            rng.choices(mix, shares)[0][1],
        )
        for at in times
    ]


def run(address: str, model: str, load: Sequence[Offered], ready: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Connect, call `ready`, then send each request at its time."""
    return asyncio.run(_run(address, model, load, ready))


async def _run(address: str, model: str, load: Sequence[Offered], ready: Callable[[], None]) -> list[Outcome]:
    transport, progress = TritonGrpc(address, model), Progress()
    await transport.open()
    try:
        ready()
        driver = Driver(transport, Limits(seconds=0.0, timeout_s=TIMEOUT_S), progress)
        await driver.open_loop((offered,) for offered in load)
    finally:
        await transport.close()
    return progress.outcomes
