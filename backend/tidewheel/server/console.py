from __future__ import annotations

import contextlib
import sys
from typing import Literal

from tqdm import tqdm

from tidewheel.server.server_log import LogLine

Phase = Literal["loading", "ready", "stopping"]
_SHOWN: dict[Phase, str] = {"loading": "W", "ready": "WEF", "stopping": ""}
_LEVELS = {"W": "warning", "E": "error", "F": "error"}


class Console:
    """Writer of the report to standard output, and of the rest to standard error, above any progress bar. A closed
    terminal does not end the server.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose

    def report(self, text: str) -> None:
        self._write(text, sys.stdout)

    def note(self, text: str) -> None:
        self._write(f"tidewheel: {text}", sys.stderr)

    def server_line(self, line: LogLine, phase: Phase) -> None:
        """Show problems, or everything if verbose. Hide errors while models load, because the reason is reported at
        the end. Hide all while the server stops: parts that miss each other are no news.
        """
        if self.verbose:
            self._write(f"{line.level} {line.message}" if line.level else line.message, sys.stderr)
        elif line.is_problem and line.level in _SHOWN[phase]:
            self.note(f"{_LEVELS[line.level]}: {line.message.strip()}")

    def _write(self, text: str, stream: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            tqdm.write(text, file=stream)
            stream.flush()  # type: ignore[attr-defined]
