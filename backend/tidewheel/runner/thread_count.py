from __future__ import annotations

import torch

from tidewheel.processor_use import ProcessorMeter, ProcessorUse

MAX_LATE = 0.35  # of the time, by all threads of a step together


class StepThreads:
    """Number of CPU threads of torch's and our C operations: fewer while other processes hold them up.

    A product waits for its last thread, and a thread that shares its core is late in each product.
    """

    def __init__(self, most: int) -> None:
        self._most = self.count = most
        self._meter = ProcessorMeter(counts_waits=True)

    def adapt(self) -> None:
        """Set the number for the next steps, if a reading of the processors' use is due."""
        if (use := self._meter.read()) is not None:
            torch.set_num_threads(self.observe(use))

    def observe(self, use: ProcessorUse) -> int:
        free = int(use.used + use.idle + 0.5)
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count
