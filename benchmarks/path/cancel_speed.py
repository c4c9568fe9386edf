"""Time from a client's cancel to the first token of the request that gets the row, over gRPC and a real server.

    python benchmarks cancel_speed --save
    python benchmarks cancel_speed --against DIR --save

Streams hold every row of a device whose steps take `--step-ms` (`modelled/engine.py`), and one request more waits. A
stream is cancelled, and the time until the one that waits has its first token is taken. `--against` compares another
checkout, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.random_model import without_weights
from common.serving import Address, free_ports, served
from common.study import ROOT, Study, commit_of, in_turns, run_in, show
from modelled.engine import modelled
from modelled.roofline import SHAPES
from tidewheel_client import AsyncClient

START_LIMIT_S = 120.0
SETTLE_S = 0.05  # until a request waits in the scheduler


class Reader(NamedTuple):
    """A stream that a task reads."""

    task: asyncio.Task[None]
    stream: Any
    first: asyncio.Future[float]  # when the first token came


def read(client: AsyncClient) -> Reader:
    stream = client.stream("5 6 7", max_tokens=1 << 13, ignore_eos=True)
    first: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def go_on() -> None:
        async for _ in stream:
            if not first.done():
                first.set_result(time.perf_counter())

    return Reader(asyncio.create_task(go_on()), stream, first)


async def cancel_times(address: Address, num_rows: int, repeats: int) -> list[float]:
    """Return times in ms."""
    times = []
    async with AsyncClient(address.grpc, model=address.model) as client:
        holders = deque(read(client) for _ in range(num_rows))
        async with asyncio.timeout(START_LIMIT_S):
            await asyncio.gather(*(holder.first for holder in holders))
        for _ in range(repeats):
            waiter = read(client)
            await asyncio.sleep(SETTLE_S)
            assert not waiter.first.done(), "a row was free"
            begin = time.perf_counter()
            holders.popleft().stream.cancel()
            times.append(1e3 * (await waiter.first - begin))
            holders.append(waiter)
        for holder in holders:
            holder.stream.cancel()
        await asyncio.gather(*(holder.task for holder in holders))
    return times


def run_here(options: argparse.Namespace) -> list[float]:
    os.environ |= modelled(options.step_ms / 1e3)
    settings = {"max_num_seqs": options.streams, "max_num_batched_tokens": 8192}
    with tempfile.TemporaryDirectory() as folder:
        model = without_weights(Path(folder) / "modelled", replace(SHAPES["tiny"], vocab=64))
        with served(model, settings, ports=free_ports(4), arguments=("--allow-faults",)) as address:
            return asyncio.run(cancel_times(address, options.streams, options.repeats))


def run_times(checkout: Path, options: argparse.Namespace) -> list[float]:
    command = ["cancel_speed", "--json"]
    for name in ("streams", "step-ms", "repeats"):
        command += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    times: list[float] = run_in(checkout, command)
    return times


def figures(times: list[float]) -> dict[str, float]:
    return {f"p{q}_ms": round(float(np.percentile(times, q)), 2) for q in (50, 95, 100)}


def main() -> None:
    study = Study("cancel_speed", __doc__, "numpy", "tritonclient", "pyzmq")
    study.add_argument("--streams", type=int, default=64, help="that hold every row (default: %(default)s)")
    study.add_argument("--step-ms", type=float, default=3.88, help="of every step (default: %(default)s)")
    study.add_argument("--repeats", type=int, default=40, help="cancels of a run (default: %(default)s)")
    study.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to be compared with this one")
    study.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    study.add_argument("--json", action="store_true", help="print the times of one run as JSON")
    options = study.begin()
    if options.json:
        print(json.dumps(run_here(options)))
        return
    checkouts = {"this": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    runs = {side: lambda checkout=checkout: run_times(checkout, options) for side, checkout in checkouts.items()}
    rounds = in_turns(runs, options.rounds, warm_up=0)
    found = {side: figures([one for times in rounds[side] for one in times]) for side in runs}
    show({"side": side, **row} for side, row in found.items())
    given = {name: getattr(options, name) for name in ("streams", "step_ms", "repeats", "rounds")}
    commits = {side: commit_of(checkout) for side, checkout in checkouts.items()}
    study.save({**given, "commits": commits, "figures": found})


if __name__ == "__main__":
    main()
