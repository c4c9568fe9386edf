"""Seconds that an operation takes on the device, without the cost of launching it and without a warm L2 cache.

On CUDA the calls are captured into a graph that goes round over several independent sets of inputs, together larger
than the L2 cache, so that none finds its data there from the call before; a replay is timed by two events and
divided by its calls. Sets that are larger than the cache need no copy. On a CPU each call is timed by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Call = Callable[[], object]
Factory = Callable[[int], Call]  # makes the call on the i-th set of inputs

NUM_SAMPLES = 20
MIN_REPLAY_S = 500e-6  # so that two events and a launch, some 10 us, weigh little
MAX_CALLS = 256
MAX_SETS = 64
MAX_MEASURING_S = 1.5  # of one operation


class Timing(NamedTuple):
    seconds: list[float]  # of one call, a sample per replay
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

    def num_sets(self, set_bytes: int) -> int:
        """Twice the cache, so that the oldest set is gone when its turn comes again."""
        if self._device.type != "cuda":
            return 1
        return max(1, min(MAX_SETS, -(-2 * self._l2_bytes // max(set_bytes, 1))))

    def measure(self, factory: Factory, set_bytes: int) -> Timing:
        """`set_bytes`: what one call reads and writes."""
        num_sets = self.num_sets(set_bytes)
        calls = [factory(index) for index in range(num_sets)]
        if self._device.type == "cuda":
            return self._on_cuda(calls)
        calls[0]()
        return Timing([_clocked(calls[0]) for _ in range(self._num_samples)], False, num_sets)

    def _on_cuda(self, calls: list[Call]) -> Timing:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles, and makes library handles, before anything is captured
            for call in (calls[0], *calls):
                call()
        torch.cuda.synchronize(self._device)
        once = self._events(lambda: [call() for call in calls]) / len(calls)
        num_calls = max(len(calls), min(MAX_CALLS, round(MIN_REPLAY_S / max(once, 1e-6))))
        rounds = [calls[index % len(calls)] for index in range(num_calls)]
        num_samples = max(3, min(self._num_samples, round(MAX_MEASURING_S / max(once * num_calls, 1e-6))))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                for call in rounds:
                    call()
        except RuntimeError:  # an operation that waits for the device, or allocates outside torch
            torch.cuda.synchronize(self._device)
            times = [self._events(lambda: [call() for call in rounds]) for _ in range(num_samples)]
            return Timing([seconds / num_calls for seconds in times], False, len(calls))
        graph.replay()
        torch.cuda.synchronize(self._device)
        times = [self._events(graph.replay) for _ in range(num_samples)]
        return Timing([seconds / num_calls for seconds in times], True, len(calls))

    def _events(self, call: Call) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def _clocked(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
