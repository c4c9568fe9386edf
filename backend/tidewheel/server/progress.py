from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tidewheel.engine.folder import Status, read_status

_FORMAT = "  {desc}{percentage:3.0f}% |{bar:30}| {elapsed}"
_STEPS = 1000


class LoadProgress:
    """Bars per loading engine on a terminal, else one line per engine and stage, for log files."""

    def __init__(self, engines: Mapping[str, Path], stream: TextIO | None = None) -> None:
        """Take `engines`: model name → folder."""
        self._engines = dict(engines)
        self._stream = stream or sys.stderr
        self._bars: dict[str, tqdm] = {}
        self._stages: dict[str, str] = {}
        self._on_terminal = self._stream.isatty()
        tqdm.monitor_interval = 0  # no thread beside the one that forks

    def update(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._update()

    def _update(self) -> None:
        for name, folder in self._engines.items():
            status = read_status(folder)
            if status is not None and status.state in ("starting", "loading", "ready"):
                self._show(name, status)

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()

    def _show(self, name: str, status: Status) -> None:
        stage = "ready" if status.state == "ready" else status.stage or "starting"
        if self._on_terminal:
            self._show_bar(name, stage, 1.0 if status.state == "ready" else status.fraction)
        elif self._stages.get(name) != stage:
            self._stages[name] = stage
            print(f"  {name}: {stage}", file=self._stream, flush=True)

    def _show_bar(self, name: str, stage: str, fraction: float) -> None:
        text = f"{name}: {stage:<10}"
        bar = self._bars.get(name)
        if bar is None:
            bar = tqdm(
                desc=text, total=_STEPS, file=self._stream, bar_format=_FORMAT, leave=False, position=len(self._bars)
            )
            self._bars[name] = bar
        bar.n = round(_STEPS * min(max(fraction, 0.0), 1.0))
        bar.set_description_str(text)
