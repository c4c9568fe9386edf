from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

from tidewheel_kernels.native.library import libgomp

SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call
_KEEP_POLICY = 8


class OwnProcessors:
    """Binding of each thread of a step to a processor, which it takes from a process that gives way.

    Linux may leave threads that wake each other on one processor, and the next to a process of low priority, whose
    slice they wait for unless their own are shorter (Linux 6.12).
    """

    def __init__(self, num_threads: int) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self._libgomp = libgomp() if num_threads == len(self._all) else None
        self._is_on = False

    def begin_step(self, is_on: bool) -> None:
        """Bind the calling thread and its team, or let them go."""
        if self._libgomp is not None and is_on != self._is_on:
            self._is_on = is_on
            self._turn(is_on, self._libgomp)
        if self._is_on:
            _allow(self._all[:1])

    def end_step(self) -> None:
        """Allow the calling thread all processors again: what it starts inherits them."""
        if self._is_on:
            _allow(self._all)

    def _turn(self, is_on: bool, runtime: str) -> None:
        library = ctypes.CDLL(runtime)

        def bind(_: object) -> None:
            number = library.omp_get_thread_num()
            _allow(self._all[number : number + 1] if is_on else self._all)
            _set_slice(SLICE_NS if is_on else 0)

        library.GOMP_parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(self._all), 0)


def _allow(processors: list[int]) -> None:
    with contextlib.suppress(OSError):  # the container may have lost them
        os.sched_setaffinity(0, processors)


def _set_slice(slice_ns: int) -> None:
    """Set the calling thread's; 0: Linux's own."""
    if (number := _SCHED_SETATTR.get(platform.machine())) is not None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("IIQiIQQQ", 48, 0, _KEEP_POLICY, niceness, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
