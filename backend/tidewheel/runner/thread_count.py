from __future__ import annotations

import threading
import time

import torch

from tidewheel.processor_use import ProcessorMeter, ProcessorUse
from tidewheel.runner.short_waits import ShortWaits
from tidewheel_kernels.native.own_processors import OwnProcessors

MAX_LATE = 0.35  # of the time, by all threads of a step together
LONG_STEP_TOKENS = 256  # products take milliseconds: a late thread then costs no more than one that is left out
PAUSE_USE = 0.5  # of a processor: less since the last reading tells nothing of threads in steps
LOOK_S = 0.05
MIN_NICED = 0.01  # of a processor, smoothed


class StepThreads:
    """CPU threads of a step: fewer while other processes hold them up, unless their number is fixed.

    A product waits for its last thread, which is late if it shares its core. Late threads sleep between products.
    Beside processes that give way, each has a processor of its own.
    """

    def __init__(self, most: int, *, is_fixed: bool = False) -> None:
        self._most = self.count = self._set = most
        self._is_fixed = is_fixed
        self.are_late, self.are_bound, self._niced = False, False, 0.0
        self._waits, self._lock, self.own = ShortWaits(), threading.Lock(), OwnProcessors(most)
        self._meter = ProcessorMeter(counts_waits=True)

    def adapt(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`: all threads for a long one."""
        if self._used(self._meter) < PAUSE_USE:
            threading.Thread(target=self._look, name="first-step", daemon=True).start()
        number = self._most if num_tokens >= LONG_STEP_TOKENS else self.count
        if number != self._set:
            self._set = number
            torch.set_num_threads(number)
        self.own.begin_step(self.are_bound)

    def _look(self) -> None:
        """Observe a step that follows a pause: threads that spin beside others' would make it last for seconds."""
        meter = ProcessorMeter(counts_waits=True, period_s=LOOK_S)
        time.sleep(LOOK_S)
        self._used(meter)

    def _used(self, meter: ProcessorMeter) -> float:
        with self._lock:
            if (use := meter.read()) is None:
                return PAUSE_USE
            self.observe(use)
            self._waits.turn(self.are_late)
            return use.used

    def observe(self, use: ProcessorUse) -> int:
        free = int(use.used + use.idle + use.niced + 0.5)
        self._niced += (use.niced - self._niced) / 2
        self.are_bound = self._niced > MIN_NICED and free >= self._most
        if use.used + use.waited > 1.0:  # no pause of requests
            self.are_late = use.waited > MAX_LATE and free < self._most
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE and free < self.count and not self._is_fixed:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count
