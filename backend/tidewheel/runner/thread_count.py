from __future__ import annotations

import time

import torch

from tidewheel.processor_use import ProcessorMeter, ProcessorUse

LOOK_S = 0.25  # between two readings of the processors' use
MAX_LATE = 0.35  # of the time, by all threads of a step together


class ThreadCount:
    """Number of CPU threads of a step: fewer while other processes hold them up.

    The threads of a product wait for the last of them, and one that shares its core is late in each product.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = most

    def observe(self, use: ProcessorUse) -> int:
        """Take the use by this process, and return the number of threads for the next steps."""
        free = int(use.used + use.idle + 0.5)
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count


class StepThreads:
    """Threads of torch's and our C operations, set between steps. Starts with the present number."""

    def __init__(self) -> None:
        self._count = ThreadCount(torch.get_num_threads())
        self._meter = ProcessorMeter(counts_waits=True)
        self._next_look = 0.0

    def adapt(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        before, use = self._count.count, self._meter.read()
        if use is not None and self._count.observe(use) != before:
            torch.set_num_threads(self._count.count)
