"""Progress of loading models, from the status files of their engines."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from tidewheel.engine.folder import State, Status, write_status
from tidewheel.server.console import LoadProgress, WaitLine, waiting


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


def progress_of(engines: dict[str, Path], out: io.StringIO) -> LoadProgress:
    """Return the progress of a load that takes no time."""
    progress = LoadProgress(engines, out)
    progress._clock = lambda: progress._since
    return progress


def test_a_log_gets_a_line_per_stage(engines: dict[str, Path]) -> None:
    out = io.StringIO()
    progress = progress_of(engines, out)
    progress.look()
    write(engines["demo"], "loading")
    progress.look()
    write(engines["demo"], "loading", "weights", 0.1)
    progress.look()
    write(engines["demo"], "loading", "weights", 0.7)
    write(engines["other"], "loading", "weights", 0.1)
    progress.look()
    write(engines["demo"], "ready")
    progress.look()
    progress.close()
    assert out.getvalue().splitlines() == ["  demo: starting", "  demo: weights", "  other: weights", "  demo: ready"]


def test_a_terminal_gets_a_line_that_goes_away(engines: dict[str, Path]) -> None:
    out = Terminal()
    progress = progress_of(engines, out)
    for fraction in (0.0, 0.5, 1.5):
        write(engines["demo"], "loading", "weights", fraction)
        progress.look()
    progress.close()
    for share in (0, 50, 100):
        assert f"demo: weights {share}%, 0 s" in out.getvalue()
    assert "demo_infer" not in out.getvalue()
    assert out.getvalue().rstrip(" ").endswith("\r")


def test_a_file_that_cannot_be_read_is_no_news(engines: dict[str, Path]) -> None:
    out = io.StringIO()
    (engines["demo"] / "status.json").write_text("{")
    LoadProgress(engines, out).look()
    assert out.getvalue() == ""


def test_a_long_wait_is_a_line_now_and_then() -> None:
    out, times = io.StringIO(), [0.0, 0.0, 4.9, 5.0, 9.9, 10.0, 19.0, 21.0]
    line = WaitLine(out, lambda: times.pop(0))
    while times:
        line.update("starting Ray")
    line.close()
    assert out.getvalue().splitlines() == [f"  starting Ray, {seconds} s so far" for seconds in (5, 10, 21)]


def test_on_a_terminal_it_is_one_line_that_goes_away() -> None:
    out, times = Terminal(), [0.0, 0.0, 3.0]
    line = WaitLine(out, lambda: times.pop(0))
    while times:
        line.update("starting Ray")
    line.close()
    assert "starting Ray, 3 s" in out.getvalue()
    assert "\n" not in out.getvalue() and out.getvalue().rstrip(" ").endswith("\r")


def test_what_is_waited_for_may_change_meanwhile() -> None:
    class Screen(Terminal):
        seen = threading.Event()

        def write(self, text: str) -> int:
            if "the gateway, " in text:
                self.seen.set()
            return super().write(text)

    what, out = "Ray", Screen()
    with waiting(lambda: what, out):
        what = "the gateway"
        assert out.seen.wait(60)


def test_a_load_says_how_long_it_takes(engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("tidewheel.server.console.FIRST_LINE_S", 0.0)
    progress = progress_of(engines, out)
    progress.look()
    write(engines["demo"], "loading", "weights")
    monkeypatch.setattr(progress, "_next_s", 0.0)
    progress.look()
    assert out.getvalue().splitlines() == [
        "  tritonserver starts, 0 s so far", "  demo: weights", "  demo: weights 0%, 0 s so far",
    ]  # fmt: skip
