"""A worker process of a few lines: answers, ends, and limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewheel.bench.worker_process import WorkerFailed, WorkerProcess

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    print(json.dumps([json.loads(line)] * 2), flush=True)
    print("a note", file=sys.stderr, flush=True)
"""
Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def of(program: str, **environment: str) -> WorkerProcess:
        return WorkerProcess("echo", [sys.executable, "-c", program], tmp_path / "echo.log", environment)

    return of


def test_a_worker_answers_line_by_line(start: Start, tmp_path: Path) -> None:
    with start(ECHO) as worker:
        assert worker.receive(60.0) == {"ready": True}
        worker.send("x" * 200_000)  # longer than a pipe
        worker.send({"a": 1})
        assert worker.receive() == ["x" * 200_000] * 2
        assert worker.receive(60.0) == [{"a": 1}] * 2
    assert "a note" in (tmp_path / "echo.log").read_text()


def test_several_answers_at_once_are_received_one_by_one(start: Start) -> None:
    with start("print(1); print(2)") as worker:
        assert [worker.receive(60.0), worker.receive(60.0)] == [1, 2]
        with pytest.raises(WorkerFailed, match=r"echo has ended: see .*echo\.log"):
            worker.receive(60.0)
        with pytest.raises(WorkerFailed, match="echo has ended"):
            worker.send("x" * 1_000_000)


def test_an_error_of_the_worker_is_raised(start: Start) -> None:
    with start("""print('{"error": "no model"}')""") as worker, pytest.raises(WorkerFailed, match="echo: no model"):
        worker.receive(60.0)


def test_a_silent_worker_runs_into_the_limit_and_is_stopped(start: Start) -> None:
    silent = start(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    )
    assert silent.receive(60.0) == 1
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.01 s"):
        silent.receive(0.01)
    silent.stop(0.01)
    with pytest.raises(WorkerFailed, match="has ended"):
        silent.receive()


def test_the_environment_is_added_to_that_of_this_process(start: Start) -> None:
    program = "import json, os; print(json.dumps([os.environ['MINE'], bool(os.environ['PATH'])]))"
    with start(program, MINE="yes") as worker:
        assert worker.receive(60.0) == ["yes", True]


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="cannot be run"):
        WorkerProcess("none", [str(tmp_path)], tmp_path / "log")
