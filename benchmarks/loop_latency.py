"""Latency of the engine's loop: from the arrival of a lone request to its first step, and the longest turn.

    python benchmarks/loop_latency.py --save

`EngineServer.serve` runs with the real scheduler, a device that answers at once, and messages in memory. `window` is
the strategy's own wait. Nothing may depend on the number of blocks: an H200 has pools of 200,000.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import numpy as np
import zmq

from study import Study, show
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.engine.messages import PROTOCOL, AddRequest, Hello, encoder
from tidewheel.engine.server import EngineServer
from tidewheel.sampling import SamplingParams
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.scenario import simulated_info

BLOCK_SIZE = 64
PROMPT = np.arange(3, 35, dtype=np.int32).tobytes()
IDENTITY = b"front end"
BATCH_TIMEOUT_MS = 50.0
IDLE_S = 0.3  # longer than the loop waits for a message
STRATEGIES = ("continuous", "static", "dynamic")


class Device:
    def __init__(self) -> None:
        self.launches: deque[float] = deque()

    def launch(self, batch: ScheduledBatch) -> Device:
        self.launches.append(time.perf_counter())
        tokens = np.where(batch.samples, np.int32(5), np.int32(SampledTokens.NOT_SAMPLED)).astype(np.int32)
        self.sampled = SampledTokens(batch.step_id, tokens)
        return self

    def wait(self) -> SampledTokens:
        return self.sampled


class Line:
    """In-memory socket that sends a request `IDLE_S` after the last launch; time between looks is a gap."""

    def __init__(self, device: Device, repeats: int) -> None:
        self.device = device
        self.left = repeats
        self.inbox = deque([encoder.encode(Hello(PROTOCOL, "one", ""))])
        self.next_arrival = time.perf_counter() + IDLE_S
        self.last_look: float | None = None
        self.arrival: float | None = None
        self.latencies: list[float] = []
        self.gaps: list[float] = []

    @property
    def is_done(self) -> bool:
        return not self.left and self.arrival is None

    def recv_multipart(self, _flags: int) -> list[bytes]:
        self._look()
        try:
            if not self.inbox:
                raise zmq.Again
            return [IDENTITY, self.inbox.popleft()]
        finally:
            self.last_look = time.perf_counter()

    def send_multipart(self, _parts: list[bytes], _flags: int) -> None:
        pass

    def poll(self, timeout_ms: int) -> int:
        self._look()
        end = min(time.perf_counter() + 1e-3 * timeout_ms, max(self.next_arrival, time.perf_counter()))
        while time.perf_counter() < end:
            time.sleep(2e-4)
        self._arrive()
        self.last_look = time.perf_counter()
        return len(self.inbox)

    def _look(self) -> None:
        now = time.perf_counter()
        if self.last_look is not None:
            self.gaps.append(now - self.last_look)
        if self.arrival is not None and self.device.launches:
            self.latencies.append(self.device.launches.popleft() - self.arrival)
            self.arrival = None
            self.device.launches.clear()
            self.next_arrival = now + IDLE_S
        self._arrive()

    def _arrive(self) -> None:
        if self.arrival is not None or not self.left or time.perf_counter() < self.next_arrival:
            return
        self.arrival = self.next_arrival
        self.inbox.append(encoder.encode(AddRequest(self.left, PROMPT, SamplingParams(max_tokens=1))))
        self.left -= 1


def measure(strategy: str, num_blocks: int, repeats: int) -> dict[str, Any]:
    timeout = {"batch_timeout_ms": BATCH_TIMEOUT_MS} if strategy == "static" else {}
    config = EngineConfig(
        model="none", scheduling_strategy=strategy, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        async_scheduling=False, **timeout,
    )  # fmt: skip
    info = simulated_info(config, H200_8B, max_model_len=8192)
    device = Device()
    line = Line(device, repeats + 1)
    server = EngineServer(
        line, build_scheduler(config, info), device, info,
        config=config, linger_s=1e9,
    )  # fmt: skip
    server.serve(lambda: "measured" if line.is_done else "")
    latencies = 1e3 * np.array(line.latencies[1:])  # without late imports
    return {
        "strategy": strategy,
        "blocks": num_blocks,
        "repeats": len(latencies),
        "median_ms": round(float(np.median(latencies)), 2),
        "max_ms": round(float(latencies.max()), 2),
        "window_ms": 0.0 if strategy == "continuous" else BATCH_TIMEOUT_MS,
        "longest_gap_ms": round(1e3 * max(line.gaps[2:]), 2),  # between looks at messages, without waits
    }


def main() -> None:
    study = Study("loop_latency", __doc__, "numpy", "pyzmq")
    study.add_argument("--blocks", type=int, nargs="+", default=[20_000, 75_000, 200_000])
    study.add_argument("--strategy", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    study.add_argument("--repeats", type=int, default=10, help="requests of each case")
    options = study.begin()
    cases = itertools.product(options.strategy, options.blocks)
    found = [measure(strategy, num_blocks, options.repeats) for strategy, num_blocks in cases]
    show(found)
    study.save({"unit": "ms", "latencies": found})


if __name__ == "__main__":
    main()
