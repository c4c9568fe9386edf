"""Open-loop load on one model, by the driver of `tidewheel bench`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tidewheel.bench.driver import Driver, Limits, Progress
from tidewheel.bench.outcome import Offered, Outcome
from tidewheel.bench.transports.triton_grpc import TritonGrpc

TIMEOUT_S = 300.0  # far beyond need


def offer(
    times: Iterable[float],
    mix: Sequence[tuple[float, dict[str, Any]]],
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    rng: random.Random,
    vocab: int = 10_000,
) -> list[Offered]:
    """Return requests of random ids; `inputs` and `outputs` are the shortest and longest length."""
    weights = [share for share, _ in mix]
    return [
        Offered(
            at,
            [rng.randrange(4, vocab) for _ in range(rng.randint(*inputs))],
            rng.randint(*outputs),
            rng.choices(mix, weights)[0][1],
        )
        for at in times
    ]


def run(address: str, model: str, load: Sequence[Offered]) -> list[Outcome]:
    return asyncio.run(_run(address, model, load))


async def _run(address: str, model: str, load: Sequence[Offered]) -> list[Outcome]:
    transport, progress = TritonGrpc(address, model), Progress()
    await transport.open()
    try:
        driver = Driver(transport, Limits(seconds=0.0, timeout_s=TIMEOUT_S), progress)
        await driver.open_loop((offered,) for offered in load)
    finally:
        await transport.close()
    return progress.outcomes
