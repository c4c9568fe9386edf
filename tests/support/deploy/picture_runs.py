"""Draw the dashboard of an overload and of a slow model, each from a run of the demo model.

    PYTHONPATH=tests:benchmarks python -m support.deploy.picture_runs docs/pictures

Every step takes 20 ms longer than it would, so that one machine can offer more than it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.dashboard_panels import Span, draw, read_panels
from support.deploy.planted_load import KEY, SETTINGS, serving_with_gateway
from support.deploy.prometheus_server import Prometheus, prometheus
from support.faults.slowed import SECONDS_FILE, slow_down
from support.triton.serving import wait_for
from tidewheel_client import AsyncClient, RequestError

PANELS = (
    "Arrivals and goodput", "Refusals by tag", "Time of a step",
    "Waiting by class", "Longest wait now", "Tokens of a step",
    "Time to first token", "Inter-token latency", "Running",
)  # fmt: skip
BEFORE_S, PLANTED_S, AFTER_S = 15.0, 30.0, 20.0
STEP_S, SLOW_STEP_S = 0.02, 0.15  # beside what the model takes
NUM_OUTPUT = 16
USUAL_RATE, HIGH_RATE = 5.0, 80.0  # requests/s
WEIGHTS_OF_CLASSES = (1, 2, 5, 2)
SERVER = SETTINGS | {"num_blocks": "400", "max_num_seqs": "16", "max_waiting_requests": "64"}


class Run(NamedTuple):
    name: str
    rate: float  # requests/s while it is planted
    step_s: float


RUNS = (Run("overload", HIGH_RATE, STEP_S), Run("slow_model", USUAL_RATE, SLOW_STEP_S))


async def ask(client: AsyncClient, rng: random.Random) -> None:
    (priority,) = rng.choices((1, 2, 3, 4), WEIGHTS_OF_CLASSES)
    prompt = [rng.randrange(100, 2000) for _ in range(rng.randrange(8, 40))]
    with contextlib.suppress(RequestError):
        await client.stream(input_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, priority=priority).read()


async def offer(url: str, rate_at: Callable[[float], float], seconds: float) -> None:
    """Send requests at random times, so many in a second, whatever becomes of earlier ones."""
    rng, start = random.Random(7), time.monotonic()
    async with AsyncClient(url, timeout_s=120.0) as client, asyncio.TaskGroup() as tasks:
        at = 0.0
        while (at := at + rng.expovariate(rate_at(at))) < seconds:
            await asyncio.sleep(max(start + at - time.monotonic(), 0.0))
            tasks.create_task(ask(client, rng))


def record(run: Run, out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = folder / "seconds"
        slow_down(seconds, STEP_S)
        variables = {"TIDEWHEEL_FAULTS": "support.faults.slowed", SECONDS_FILE: str(seconds)}
        with (
            serving_with_gateway(folder, SERVER, variables) as server,
            prometheus(folder, server, gateway_key=KEY, interval="500ms", window="5s") as running,
        ):
            wait_for(lambda: "up" in running.targets().values(), 60, "a scraped server")
            start = time.time()
            asyncio.run(plant(run, server.grpc, seconds))
            shaded = (start + BEFORE_S, start + BEFORE_S + PLANTED_S)
            save(run, running, Span(start, time.time(), shaded), out)


async def plant(run: Run, url: str, seconds: Path) -> None:
    def is_planted(at: float) -> bool:
        return BEFORE_S <= at < BEFORE_S + PLANTED_S

    def rate_at(at: float) -> float:
        return run.rate if is_planted(at) else USUAL_RATE

    loop = asyncio.get_running_loop()
    loop.call_later(BEFORE_S, slow_down, seconds, run.step_s)
    loop.call_later(BEFORE_S + PLANTED_S, slow_down, seconds, STEP_S)
    await offer(url, rate_at, BEFORE_S + PLANTED_S + AFTER_S)


def save(run: Run, running: Prometheus, span: Span, out: Path) -> None:
    path = out / f"{run.name}.webp"
    path.write_bytes(draw(running.url, read_panels(PANELS), "demo", span, "webp"))
    print(path, sorted({labels["alertname"] for labels in running.firing()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        record(run, out)


if __name__ == "__main__":
    main()
