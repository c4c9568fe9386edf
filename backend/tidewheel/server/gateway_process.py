"""The gateway of a server: a process beside tritonserver, which it outlives when that is started again."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable

from tidewheel.server import ServeError, processes
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.revival import Restarts

_START_S = 30.0
_DRAIN_S = 1.0  # for the last bytes of answers: the server has drained before


class GatewayProcess:
    """Owner of the process, which lives as long as the `with` block. Not thread safe."""

    def __init__(
        self, endpoints: Endpoints, arguments: Iterable[str], *, pids: set[int], note: Callable[[str], None]
    ) -> None:
        """`arguments` are options of `tidewheel gateway`; `pids` holds the process's id."""
        url = f"{endpoints.authority(endpoints.grpc)},metrics={endpoints.metrics},health={endpoints.health}"
        url += f",http={endpoints.http}"
        self._command = [sys.executable, "-P", "-m", "tidewheel.cli.main", "gateway", f"--host={endpoints.host}"]
        self._command += [f"--port={endpoints.openai}", f"--url={url}", f"--drain-s={_DRAIN_S}"]
        self._command += arguments
        self._health = f"http://{endpoints.authority(endpoints.openai or 0)}/health"
        self._pids = pids
        self._note = note
        self._restarts = Restarts()
        self._start_at = 0.0  # of the next one, after a death
        self._start()

    def wait_ready(self) -> None:
        """Wait until it has seen that the server is ready. Raise `ServeError` if it cannot start."""
        if not processes.wait_until(lambda: self._process.poll() is not None or self._is_ready(), _START_S):
            raise ServeError(f"the gateway is not ready after {_START_S:g} s")
        if self._process.poll() is not None:
            raise ServeError(f"the gateway ended at its start with exit code {self._process.returncode}")

    def watch(self) -> None:
        """Start it again some time after it died. Raise `CrashLoop` after too many deaths."""
        now = time.monotonic()
        if self._start_at:
            if now >= self._start_at:
                self._start()
        elif self._process.poll() is not None:
            reason = f"the gateway died (process {self._process.pid})"
            self._start_at = now + self._restarts.next_delay_s(now - self._started_at, reason)
            self._note(f"{reason}; starting it again")

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(2 * _DRAIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        # In its own session: Ctrl-C reaches only the supervisor, which ends the others in order.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self._started_at, self._start_at = time.monotonic(), 0.0
        self._pids.clear()
        self._pids.add(self._process.pid)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._health, timeout=1.0):  # noqa: S310 - always http
                return True
        except OSError:
            return False
