"""Marks of front ends in the run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidewheel.adapter.stub_process import Presence, PresenceMark, read_mark
from tidewheel_process.child import start_ticks


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def mine() -> PresenceMark | None:
    return read_mark(os.getpid(), start_ticks(os.getpid()) or 0)


@pytest.mark.usefixtures("run_dir")
def test_a_mark_counts_open_requests_until_it_is_removed() -> None:
    assert mine() is None
    presence = Presence("a model")
    assert mine() == PresenceMark("a model", 0)
    for _ in range(3):
        presence.count(1)
    presence.count(-1)
    assert mine() == PresenceMark("a model", 2)
    assert read_mark(os.getpid(), 1) is None  # an earlier process of this number
    presence.remove()
    presence.remove()
    presence.count(-1)
    assert mine() is None


def test_marks_of_processes_that_are_gone_are_removed(run_dir: Path) -> None:
    Presence("a model")
    marks = run_dir / "front_ends"
    (marks / "4194305-7").touch()  # beyond any process id
    (marks / "1-7").touch()
    Presence("a model")
    assert {path.name.partition("-")[0] for path in marks.iterdir()} == {"1", str(os.getpid())}
