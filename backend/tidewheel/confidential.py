import contextlib
import logging
import resource
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType


def forbid_core_dumps() -> None:
    """Forbid core dumps of this process and its later children.

    A kernel that pipes dumps to a program ignores RLIMIT_CORE, so `coredump_filter` leaves all memory out.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not in every kernel
        Path("/proc/self/coredump_filter").write_bytes(b"0")


def protect_texts() -> None:
    """Forbid core dumps, and report uncaught errors without messages, which may quote a prompt."""
    forbid_core_dumps()
    sys.excepthook = lambda kind, _, trace: _report(kind, trace)
    threading.excepthook = lambda args: _report(args.exc_type, args.exc_traceback)


class TracebackFormatter(logging.Formatter):
    """Formatter of tracebacks without messages."""

    def formatException(self, ei: object) -> str:  # noqa: N802 - of logging
        assert isinstance(ei, tuple)
        kind, _, trace = ei
        return _without_message(kind, trace)


def log_to_stderr(level: int, layout: str | None = None) -> None:
    """Log to standard error, from `level` on, with `TracebackFormatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(TracebackFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


def _report(kind: type[BaseException], trace: TracebackType | None) -> None:
    print(_without_message(kind, trace), file=sys.stderr, flush=True)  # noqa: T201


def _without_message(kind: type[BaseException] | None, trace: TracebackType | None) -> str:
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(trace)] if trace else []
    return f"{''.join(lines)}{kind.__qualname__ if kind else None} (its message is not shown)"
