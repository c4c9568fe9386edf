"""A program in a terminal of its own, which is typed into and read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence

from support.triton.serving import wait_for

_STYLES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
LIMIT_S = 60.0


class Terminal:
    def __init__(self, command: Sequence[str], columns: int = 150, rows: int = 50) -> None:
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self._read = bytearray()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_shown(self, words: str) -> None:
        """Wait until the words have been written since the last look."""
        seen = 0

        def is_shown() -> bool:
            nonlocal seen
            seen = len(self._read)
            return words in _STYLES.sub("", self._read.decode(errors="replace"))

        wait_for(is_shown, LIMIT_S, f"{words!r} in the terminal")
        del self._read[:seen]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(LIMIT_S)
        os.close(self._end)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the program has ended
            while got := os.read(self._end, 65536):
                self._read += got


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    one = Terminal(command)
    try:
        yield one
    finally:
        one.close()
