import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch

from tidewheel.processor_use import PERIOD_S, ProcessorMeter, ProcessorUse
from tidewheel_kernels.native.library import libgomp
from tidewheel_kernels.native.own_processors import OwnProcessors

MIN_NICED = 0.01  # of a processor, smoothed
MAX_LATE = 0.35  # of the time, by all threads of a step together
LONG_STEP_TOKENS = 256  # products take milliseconds: a late thread then costs no more than one that is left out
LOOK_S = 0.05  # after the start of a step that ends a pause
HOLDER = "short-waits"  # name of a thread


class ShortWaits:
    """Switch that has threads of GNU OpenMP sleep soon after a product, not spin for milliseconds.

    libgomp reads `GOMP_SPINCOUNT` when it is loaded, but spins 100 times at most while it has more threads than
    processors (its manual): here a team that does nothing. A given `OMP_WAIT_POLICY` stands.
    """

    def __init__(self) -> None:
        self._end: threading.Event | None = None
        self._libgomp = None if "OMP_WAIT_POLICY" in os.environ else libgomp()

    def turn(self, is_on: bool) -> None:
        if self._libgomp is None or is_on == (self._end is not None):
            return
        if self._end is not None:
            self._end.set()
            self._end = None
            return
        self._end = threading.Event()
        weakref.finalize(self, self._end.set).atexit = False
        threading.Thread(target=_hold_team, args=(self._libgomp, self._end), name=HOLDER, daemon=True).start()


class StepThreads:
    """CPU threads of a step: fewer while other processes hold them up, unless their number is fixed.

    A product waits for its last thread, which is late if it shares its core. Late threads sleep between products.
    Beside processes that give way, each has a processor of its own.
    """

    def __init__(self, most: int, *, is_fixed: bool = False) -> None:
        self._most = self.count = self._set = most
        self._is_fixed = is_fixed
        self.are_late, self.are_bound, self._niced = False, False, 0.0
        self._waits, self.own = ShortWaits(), OwnProcessors(most)
        self._has_begun = threading.Event()  # a step
        watch = (weakref.ref(self), self._has_begun)
        threading.Thread(target=_watch, args=watch, name="step-threads", daemon=True).start()

    def adapt(self, num_tokens: int) -> None:
        """Set the number for a step of `num_tokens`: all threads for a long one."""
        self._has_begun.set()
        number = self._most if num_tokens >= LONG_STEP_TOKENS else self.count
        if number != self._set:
            self._set = number
            torch.set_num_threads(number)
        self.own.begin_step(self.are_bound)

    def observe(self, use: ProcessorUse) -> int:
        free = use.free
        self._niced += (use.niced - self._niced) / 2
        self.are_bound = self._niced > MIN_NICED and free >= self._most
        if use.used + use.waited > 1.0:  # no pause of requests
            self.are_late = use.waited > MAX_LATE and free < self._most
        self._waits.turn(self.are_late)
        if free > self.count:
            self.count = min(free, self._most)
        elif use.waited > MAX_LATE and free < self.count and not self._is_fixed:
            self.count = max(self.count - max(round(use.waited), 1), 1)
        return self.count


def _watch(threads: Callable[[], StepThreads | None], has_begun: threading.Event) -> None:
    """Tell `threads`, while they live, the use of processors: in pauses too, and soon after the step that ends one.

    Threads that spin beside others' would make a first step last for seconds.
    """
    meter, is_pause = ProcessorMeter(counts_waits=True, period_s=LOOK_S), True
    while True:
        if has_steps := has_begun.wait(PERIOD_S):
            if is_pause:
                meter.read()
            time.sleep(LOOK_S if is_pause else PERIOD_S)
            has_begun.clear()
        is_pause = not has_steps
        if (watched := threads()) is None:
            return
        if (use := meter.read()) is not None:
            watched.observe(use)
        del watched


def _hold_team(libgomp: str, end: threading.Event) -> None:
    """Have more threads than processors until `end`; they end with their first."""
    library = ctypes.CDLL(libgomp)
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
    end.wait()
