from __future__ import annotations

import torch

from tidewheel.processor_use import ProcessorMeter, ProcessorUse

MAX_LATE = 0.35  # of the time, by all threads of a step together
LONG_STEP_TOKENS = 256  # products take milliseconds: a late thread then costs no more than one that is left out


class StepThreads:
    """Number of CPU threads of a step: fewer while other processes hold them up.

    A product waits for its last thread, which is late if it shares its core.
    """

    def __init__(self, most: int) -> None:
        self._most = self.count = self._set = most
        self._meter = ProcessorMeter(counts_waits=True)

    def adapt(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`: all threads for a long one."""
        if (use := self._meter.read()) is not None:
            self.observe(use)
        number = self._most if num_tokens >= LONG_STEP_TOKENS else self.count
        if number != self._set:
            self._set = number
            torch.set_num_threads(number)

    def observe(self, use: ProcessorUse) -> int:
        free = int(use.used + use.idle + 0.5)
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count
