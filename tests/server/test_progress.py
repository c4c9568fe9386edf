"""Progress of loading models, from the status files of their engines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tidewheel.engine.folder import State, Status, write_status
from tidewheel.server.console import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write(folder: Path, state: State, stage: str = "", fraction: float = 0.0) -> None:
    write_status(folder, Status(state=state, pid=1, start_ticks=1, settings={}, stage=stage, fraction=fraction))


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / name for name in ("demo", "other", "demo_infer")}
    for folder in folders.values():
        folder.mkdir()
    return folders


def test_a_log_gets_a_line_per_stage(engines: dict[str, Path]) -> None:
    out = io.StringIO()
    progress = LoadProgress(engines, out)
    progress.update()
    write(engines["demo"], "loading")
    progress.update()
    write(engines["demo"], "loading", "weights", 0.1)
    progress.update()
    write(engines["demo"], "loading", "weights", 0.7)
    write(engines["other"], "loading", "weights", 0.1)
    progress.update()
    write(engines["demo"], "ready")
    progress.update()
    progress.close()
    assert out.getvalue().splitlines() == ["  demo: starting", "  demo: weights", "  other: weights", "  demo: ready"]


def test_a_terminal_gets_a_bar_that_goes_away(engines: dict[str, Path]) -> None:
    out = Terminal()
    progress = LoadProgress(engines, out)
    for fraction in (0.0, 0.5, 1.5):
        write(engines["demo"], "loading", "weights", fraction)
        progress.update()
    progress.close()
    for part in ("demo: weights", "  0% |", " 50% |", "100% |"):
        assert part in out.getvalue()
    assert "demo_infer" not in out.getvalue()
    assert out.getvalue().rstrip(" ").endswith("\r")


def test_a_file_that_cannot_be_read_is_no_news(engines: dict[str, Path]) -> None:
    out = io.StringIO()
    (engines["demo"] / "status.json").write_text("{")
    LoadProgress(engines, out).update()
    assert out.getvalue() == ""
