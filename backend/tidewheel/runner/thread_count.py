from __future__ import annotations

import torch

from tidewheel.processor_use import ProcessorMeter, ProcessorUse
from tidewheel.runner.short_waits import ShortWaits

MAX_LATE = 0.35  # of the time, by all threads of a step together
LONG_STEP_TOKENS = 256  # products take milliseconds: a late thread then costs no more than one that is left out


class StepThreads:
    """CPU threads of a step: fewer while other processes hold them up, unless their number is fixed.

    A product waits for its last thread, which is late if it shares its core. Late threads sleep between products.
    """

    def __init__(self, most: int, *, is_fixed: bool = False) -> None:
        self._most = self.count = self._set = most
        self._is_fixed = is_fixed
        self.are_late = False
        self._waits = ShortWaits()
        self._meter = ProcessorMeter(counts_waits=True)

    def adapt(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`: all threads for a long one."""
        if (use := self._meter.read()) is not None:
            self.observe(use)
            self._waits.turn(self.are_late)
        number = self._most if num_tokens >= LONG_STEP_TOKENS else self.count
        if number != self._set:
            self._set = number
            torch.set_num_threads(number)

    def observe(self, use: ProcessorUse) -> int:
        free = int(use.used + use.idle + 0.5)
        if use.used + use.waited > 1.0:  # no pause of requests
            self.are_late = use.waited > MAX_LATE and free < self._most
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE and free < self.count and not self._is_fixed:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count
