"""Device seconds of an operation, without launch cost or a warm L2 cache.

On CUDA, a graph of calls goes round over sets of inputs, together larger than the L2 cache. Two events time a replay.
It queues behind another replay, during which the host queues all of it, so the events contain no wait for the host.
On a CPU each call is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidewheel.runner.accelerator import capture_into

Call = Callable[[], object]
Factory = Callable[[int], Call]  # call on the i-th set
Maker = Callable[[torch.device], Call]

NUM_SAMPLES = 20
MIN_REPLAY_S = 2e-3  # at the speed without a graph
WAKING, WAKING_CALLS = 8192, 100
MAX_CALLS = 256
MAX_SETS = 64
MAX_MEASURING_S = 1.5


@dataclass(frozen=True, slots=True)
class KernelCase:
    name: str
    case: str  # sizes
    num_bytes: int  # that must move
    makers: Mapping[str, Maker]  # by owner
    flops: float = 0.0  # 0: bound by bandwidth


class Timing(NamedTuple):
    seconds: list[float]  # of one call, by replay
    in_graph: bool
    num_sets: int

    @property
    def details(self) -> dict[str, object]:
        return {"in_graph": self.in_graph, "input_sets": self.num_sets}


class Timer:
    def __init__(self, device: torch.device, *, is_dry: bool = False) -> None:
        self._device = device
        self._num_samples = 2 if is_dry else NUM_SAMPLES
        self._l2_bytes = 0
        if device.type == "cuda":
            self._l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            _wake(device)

    def num_sets(self, set_bytes: int) -> int:
        """Return how many sets fill the cache twice."""
        if self._device.type != "cuda":
            return 1
        return max(1, min(MAX_SETS, -(-2 * self._l2_bytes // max(set_bytes, 1))))

    def measure(self, factory: Factory, set_bytes: int) -> Timing:
        """Time calls that read and write `set_bytes`."""
        num_sets = self.num_sets(set_bytes)
        calls = [factory(index) for index in range(num_sets)]
        if self._device.type == "cuda":
            return self._on_cuda(calls)
        calls[0]()
        return Timing([_clocked(calls[0]) for _ in range(self._num_samples)], False, num_sets)

    def _on_cuda(self, calls: list[Call]) -> Timing:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles before the capture
            for call in (calls[0], *calls):
                call()
        torch.cuda.synchronize(self._device)
        once = self._events(lambda: [call() for call in calls]) / len(calls)
        wanted = min(MAX_CALLS, MIN_REPLAY_S / max(once, 1e-6))
        rounds = calls * max(1, round(wanted / len(calls)))
        num_calls = len(rounds)
        num_samples = max(3, min(self._num_samples, round(MAX_MEASURING_S / max(once * num_calls, 1e-6))))

        def run() -> None:
            for call in rounds:
                call()

        torch.cuda.empty_cache()  # for the capture, which frees none of it
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                capture_into(graph, run, torch.cuda.graph_pool_handle())
        except RuntimeError:  # not an operation for a graph
            torch.cuda.synchronize(self._device)
            times = [self._events(run) for _ in range(num_samples)]
            return Timing([seconds / num_calls for seconds in times], False, len(calls))
        graph.replay()
        torch.cuda.synchronize(self._device)
        times = [self._events(graph.replay, behind=graph.replay) for _ in range(num_samples)]
        return Timing([seconds / num_calls for seconds in times], True, len(calls))

    def _events(self, call: Call, behind: Call = lambda: None) -> float:
        """Return device seconds between the ends of `behind` and `call`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        behind()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def _wake(device: torch.device) -> None:
    """Work about 100 ms: idle devices have low clocks."""
    matrix = torch.zeros(WAKING, WAKING, dtype=torch.bfloat16, device=device)
    for _ in range(WAKING_CALLS):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
