"""Guard of a server: a process that outlives the supervisor for a moment, and leaves nothing of the server.

The supervisor holds one end of a pipe, which the kernel closes however the supervisor ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tidewheel.private_dir import RUN_DIR
from tidewheel.server import workdir
from tidewheel.server.workdir import WorkDir

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_END_TIMEOUT_S = 5.0


class Lifeline:
    """Guard that cleans up behind this process, also at the end of the `with` block."""

    def __init__(self, work: WorkDir) -> None:
        self._root = work.root
        self._reader, self._writer = os.pipe()
        self._guard = self._start()

    @property
    def pid(self) -> int:
        return self._guard.pid

    def keep(self) -> None:
        """Start another guard if the one before has ended, or leave it to the next call if that fails."""
        if self._guard.poll() is not None:
            with contextlib.suppress(OSError):
                self._guard = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", __name__, str(self._root)],
            stdin=self._reader,
            env={key: value for key, value in os.environ.items() if key != RUN_DIR},
            start_new_session=True,
        )

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._reader)
        os.close(self._writer)
        try:
            self._guard.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def stop_with_parent(stdin: int, stop: Callable[[], None]) -> None:
    """Call `stop` once the other end of a pipe is closed, which the kernel does however its owner ends.

    So it is told once. A parent-death signal comes for every thread of a parent that dies.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(stdin, 4096):
                pass
        stop()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    workdir.remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
