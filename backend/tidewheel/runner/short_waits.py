from __future__ import annotations

import ctypes
import os
import threading
import weakref

from tidewheel_kernels.native.library import libgomp

NAME = "short-waits"  # of the thread


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
        threading.Thread(target=_hold_team, args=(self._libgomp, self._end), name=NAME, daemon=True).start()


def _hold_team(libgomp: str, end: threading.Event) -> None:
    """Have more threads than processors until `end`; they end with their first."""
    library = ctypes.CDLL(libgomp)
    nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
    library.GOMP_parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
    end.wait()
