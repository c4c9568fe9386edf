"""Readiness that other threads read from a supervisor, in a process whose children it may end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tidewheel.engine import connection

SCRIPT = """
import os, signal, sys
from functools import partial
from pathlib import Path

from tidewheel.server import ServeError
from tidewheel.server.console import Console
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import ServerPlan, Supervisor
from tidewheel.server.workdir import guarded, work_dir
from tidewheel_process import process_tree
from tidewheel_process.current_process import StopSignals


def show(supervisor):
    print(*filter(None, supervisor.readiness), sep=": ")


def kill_server(supervisor):
    (server,) = (child for child in process_tree.children(os.getpid()) if child.pid != guard.pid)
    os.kill(server.pid, signal.SIGKILL)
    try:
        supervisor.watch(lambda: False)
    except ServeError as error:
        return error


with StopSignals() as signals, work_dir(Path(sys.argv[1])) as work, guarded(work.root) as guard:
    start = partial(
        Supervisor, plan=ServerPlan(["/bin/sleep", "60"], os.environ, Endpoints(http=9), {}, ""), signals=signals,
        log=ServerLog(), guard=guard, work=work, console=Console(verbose=False),
    )
    supervisor = start()
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
    with start() as supervisor:
        supervisor.wait_ready(lambda: True, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.watch(lambda: False)
        supervisor.drain(0.1)
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
    ("engines", "num_left"),
    [
        ({}, None),
        ({"dead": 0}, None),
        ({"one": 0, "dead": 3}, 0),
        ({"one": 0, "two": 1}, 1),
        ({"one": 0, "silent": None}, 1),
    ],
)
def test_an_engine_that_does_not_answer_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, engines: dict[str, int | None], num_left: int | None
) -> None:
    """Its step may take longer than the wait for an answer."""

    def answer(folder: Path, *_: object) -> SimpleNamespace | None:
        num_running = engines[folder.name]
        left = SimpleNamespace(num_running=num_running, num_waiting=0)
        return None if num_running is None else SimpleNamespace(stats=left)

    monkeypatch.setattr(connection, "ask", answer)
    monkeypatch.setattr(connection, "read_serving", lambda folder: folder.name != "dead")
    assert connection.drain_all([Path(name) for name in engines], 1.0) == num_left
