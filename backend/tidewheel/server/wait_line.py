"""Status line of a wait, with the seconds so far: redrawn on a terminal, else printed ever more rarely."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

FIRST_LINE_S = 5.0  # until the first line without a terminal; each later one takes twice as long
_TICK_S = 0.5


class WaitLine:
    """Status line below any progress bar, erased by `close`. Errors of a closed terminal are ignored."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._since = clock()
        self._next_s = FIRST_LINE_S
        self._bar: tqdm | None = None

    def update(self, what: str) -> None:
        """Show `what` and the seconds since the line was made. Call it every 0.5 s."""
        seconds = self._clock() - self._since
        with contextlib.suppress(OSError, ValueError):
            if self._stream.isatty():
                self._draw(f"  {what}, {seconds:.0f} s")
            elif seconds >= self._next_s:
                self._next_s = 2 * seconds
                print(f"  {what}, {seconds:.0f} s so far", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None

    def _draw(self, text: str) -> None:
        tqdm.monitor_interval = 0  # no thread beside one that forks
        if self._bar is None:
            self._bar = tqdm(desc=text, file=self._stream, bar_format="{desc}", leave=False, dynamic_ncols=True)
        self._bar.set_description_str(text)


@contextlib.contextmanager
def waiting(what: Callable[[], str], stream: TextIO | None = None) -> Iterator[None]:
    """Show `what()` and the seconds so far on `stream` (default: standard error) until the block ends."""
    line, is_over = WaitLine(stream), threading.Event()

    def tick() -> None:
        while not is_over.wait(_TICK_S):
            line.update(what())

    thread = threading.Thread(target=tick, name="wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        line.close()
