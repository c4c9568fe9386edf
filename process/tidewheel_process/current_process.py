import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
MAX_DESCRIPTORS = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StopSignals:
    """Counter of SIGINT, SIGTERM, SIGHUP and SIGQUIT; waits go on. Main thread only, except `stop`."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self) -> None:
        """Raise a count of 0 to 1, from any thread."""
        self.count = self.count or 1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def call_at_end_of(descriptor: int, stop: Callable[[], None]) -> None:
    """Start a thread that calls `stop` when the pipe's writer closes or its process dies."""

    # A parent-death signal would come for every thread of the parent that ends.
    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        stop()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send a signal when the thread that started this process ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_DESCRIPTORS
    limit = max(soft, MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
