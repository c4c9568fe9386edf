"""Latency of the engine's loop: from arrival to first step, and the longest turn.

    python benchmarks/loop_latency.py [--blocks 20000 75000 200000] [--strategy continuous static dynamic]
        [--repeats 10] [--json] [--save]

`EngineServer.serve` runs with the real scheduler, a device that answers at once, and messages in memory. In each
repeat a lone request for one token reaches the idle engine; `static` has a timeout of 50 ms. Reported are
milliseconds from arrival to launch, the strategy's part of them, and the longest time between looks at messages. None
may depend on the number of blocks: an H200 has pools of 200,000.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np
import zmq

import record
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.engine.messages import PROTOCOL, AddRequest, EngineInfo, Hello, encoder
from tidewheel.engine.server import EngineServer
from tidewheel.sampling import SamplingParams

BLOCK_SIZE = 64
VOCAB_SIZE = 32_000
PROMPT = np.arange(3, 35, dtype=np.int32).tobytes()
IDENTITY = b"front end"
BATCH_TIMEOUT_MS = 50.0
IDLE_S = 0.3  # longer than the loop waits for a message
STRATEGIES = ("continuous", "static", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    strategy: str
    blocks: int
    repeats: int
    median_ms: float  # from arrival to first launch
    max_ms: float
    window_ms: float  # the strategy's wait
    longest_gap_ms: float  # between looks at messages, waits excluded


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
    """In-memory socket that sends a request `IDLE_S` after the last launch.

    Time between looks is the loop's own and counts as a gap.
    """

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
        """Add the next request once due, as of that moment."""
        if self.arrival is not None or not self.left or time.perf_counter() < self.next_arrival:
            return
        self.arrival = self.next_arrival
        self.inbox.append(encoder.encode(AddRequest(self.left, PROMPT, SamplingParams(max_tokens=1))))
        self.left -= 1


def engine_info(config: EngineConfig, num_blocks: int) -> EngineInfo:
    return EngineInfo(
        pid=0, model=config.model, architecture="none", device="cpu", dtype="", vocab_size=VOCAB_SIZE,
        max_model_len=8192, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=BLOCK_SIZE, num_blocks=num_blocks, weights_bytes=0, activation_bytes=0, kv_cache_bytes=0,
        enable_prefix_caching=True, load_seconds=0.0,
    )  # fmt: skip


def measure(strategy: str, num_blocks: int, repeats: int) -> Latency:
    timeout = {"batch_timeout_ms": BATCH_TIMEOUT_MS} if strategy == "static" else {}
    config = EngineConfig(model="none", scheduling_strategy=strategy, **timeout)
    info = engine_info(config, num_blocks)
    device = Device()
    line = Line(device, repeats + 1)
    server = EngineServer(
        line, build_scheduler(config, info), device, info,
        config=config, linger_s=1e9,
    )  # fmt: skip
    server.serve(lambda: "measured" if line.is_done else "")
    latencies = 1e3 * np.array(line.latencies[1:])  # the first pays for late imports
    return Latency(
        strategy=strategy,
        blocks=num_blocks,
        repeats=len(latencies),
        median_ms=round(float(np.median(latencies)), 2),
        max_ms=round(float(latencies.max()), 2),
        window_ms=0.0 if strategy == "continuous" else BATCH_TIMEOUT_MS,
        longest_gap_ms=round(1e3 * max(line.gaps[2:]), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[20_000, 75_000, 200_000])
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--repeats", type=int, default=10, help="requests of each case")
    parser.add_argument("--json", action="store_true", help="machine readable, one list")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/loop_latency.json")
    options = parser.parse_args()
    environment = record.environment("numpy", "pyzmq")
    found = [
        measure(strategy, num_blocks, options.repeats)
        for strategy in options.strategy
        for num_blocks in options.blocks
    ]
    if options.save:
        record.save("loop_latency", {**environment, "unit": "ms", "latencies": [asdict(one) for one in found]})
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    columns = tuple(asdict(found[0]))
    print(" ".join(f"{name:>14}" for name in columns))
    for one in found:
        print(" ".join(f"{value!s:>14}" for value in asdict(one).values()))


if __name__ == "__main__":
    main()
