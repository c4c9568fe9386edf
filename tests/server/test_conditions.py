"""Readiness that other threads read from a supervisor, in a process whose children it may end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
from pathlib import Path

from tidewheel.server import ServeError, processes
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.processes import StopSignals
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import Supervisor
from tidewheel.server.workdir import work_dir


def show(supervisor):
    print(*filter(None, supervisor.readiness), sep=": ")


def kill_server(supervisor):
    (server,) = processes.children(os.getpid())
    os.kill(server.pid, signal.SIGKILL)
    try:
        supervisor.watch(lambda: False)
    except ServeError as error:
        return error


parts = {"log": ServerLog(), "guard": 0, "note": print, "on_line": print}
with StopSignals() as signals, work_dir(Path(sys.argv[1])) as work:
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
