"""Readiness that other threads read from a supervisor, in a process whose children it may end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidewheel.server import supervisor

SCRIPT = """
import os, signal, sys
from pathlib import Path

from tidewheel.server import ServeError, processes
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.lifeline import Lifeline
from tidewheel.server.processes import StopSignals
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import Supervisor
from tidewheel.server.workdir import work_dir


def show(supervisor):
    print(*filter(None, supervisor.readiness), sep=": ")


def kill_server(supervisor):
    (server,) = (child for child in processes.children(os.getpid()) if child.pid != parts["guard"].pid)
    os.kill(server.pid, signal.SIGKILL)
    try:
        supervisor.watch(lambda: False)
    except ServeError as error:
        return error


parts = {"log": ServerLog(), "note": print, "on_line": print}
with StopSignals() as signals, work_dir(Path(sys.argv[1])) as work, Lifeline(work) as guard:
    parts["guard"] = guard
    supervisor = Supervisor(["/bin/sleep", "60"], os.environ, signals=signals, work=work, **parts)
    try:
        with supervisor:
            show(supervisor)
            for _ in range(2):
                supervisor.wait_ready(lambda: True, lambda: None)
                show(supervisor)
                supervisor.restart(kill_server(supervisor))
                show(supervisor)
            raise ServeError("enough")
    except ServeError:
        show(supervisor)
    with Supervisor(["/bin/sleep", "60"], os.environ, signals=signals, work=work, **parts) as supervisor:
        supervisor.wait_ready(lambda: True, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.watch(lambda: False)
        supervisor.drain(0.1, Endpoints(http=9))
        show(supervisor)
"""


def test_readiness_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    death = "starting: tritonserver died (signal 9, Killed)"
    assert done.stdout.splitlines() == [
        "starting: the server is starting",
        *("ready", death) * 2,
        "stopped: enough",
        "draining: the server is shutting down",
    ], done.stderr


@pytest.mark.parametrize(
    ("engines", "idle"),
    [
        ({}, None),
        ({"dead": 0}, None),
        ({"one": 0, "dead": 3}, True),
        ({"one": 0, "two": 1}, False),
        ({"one": 0, "silent": None}, False),
    ],
)
def test_an_engine_that_does_not_answer_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, engines: dict[str, int | None], idle: bool | None
) -> None:
    """Its step may take longer than the wait for an answer."""

    def drain(folder: Path, timeout_s: float) -> SimpleNamespace | None:
        num_running = engines[folder.name]
        return None if num_running is None else SimpleNamespace(num_running=num_running, num_waiting=0)

    def status(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(state="ready", is_alive=folder.name != "dead")

    monkeypatch.setattr(supervisor, "drain", drain)
    monkeypatch.setattr(supervisor, "read_status", status)
    assert supervisor._drain_engines([Path(name) for name in engines]) is idle
