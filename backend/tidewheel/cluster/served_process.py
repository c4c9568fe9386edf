"""`tidewheel serve` below a replica, which it does not outlive."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from tidewheel.cluster import ClusterError
from tidewheel.health_endpoint import Readiness
from tidewheel.private_dir import private_dir, run_dir
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import read_ports_file
from tidewheel_process import process_tree
from tidewheel_process.handle import start_ticks

_END_S = 15.0  # for a server to end
_ASK_S = 2.0
_FOLDER = "replicas"
_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")


class _Told(msgspec.Struct):
    """Answer of the health endpoint."""

    state: str
    reason: str


class ServedProcess:
    """Owner of the process. A pipe to its standard input ends it, however this process ends."""

    def __init__(self, options: Sequence[str], host: str) -> None:
        folder = _swept(private_dir(run_dir() / _FOLDER))
        self._ports = folder / f"{os.getpid()}.json"
        self.log = folder / f"{os.getpid()}.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "tidewheel.cli.main",
            "serve",
            *options,
            f"--host={host}",
            *_FREE_PORTS,
        ]
        # No drain: one that is stopped has no streams left, and those of one that dies are told at once.
        command += [f"--ports-file={self._ports}", "--end-with-stdin", "--drain-s=0"]
        with self.log.open("wb") as output:
            # In its own session, so that no signal to the parent's group reaches it.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        self._endpoints: Endpoints | None = None
        self._tritonserver: psutil.Process | None = None  # as seen last
        self.num_restarts = 0  # of tritonserver, as far as `look` has seen

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def endpoints(self) -> Endpoints | None:
        """Return where it listens, once that is known."""
        if self._endpoints is None:
            self._endpoints = read_ports_file(self._ports)
        return self._endpoints

    def look(self) -> None:
        """Update `num_restarts`: add one if another tritonserver process runs than at the last look."""
        for child in process_tree.children(self.pid):
            if process_tree.name(child) == "tritonserver" and child != self._tritonserver:
                self.num_restarts += self._tritonserver is not None
                self._tritonserver = child

    def readiness(self) -> Readiness:
        """Ask its health endpoint. Raise `ClusterError` if it has ended."""
        if self._process.poll() is not None:
            raise ClusterError(self._last_words())
        if self.endpoints is None:
            return Readiness("starting", "it chooses its ports")
        try:
            return _ask(f"http://{self.endpoints.authority(self.endpoints.health)}/ready")
        except (OSError, msgspec.DecodeError) as error:
            return Readiness("starting", f"its health endpoint does not answer: {error}")

    def stop(self) -> None:
        """End it, and wait for it. Requests that it has end with an error."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its guard ends the rest
            self._process.wait()
        self.log.unlink(missing_ok=True)

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith("tidewheel: error: ")] or lines
        reason = told[-1].removeprefix("tidewheel: error: ") if told else "it said nothing"
        return f"tidewheel serve ended with exit code {self._process.returncode}: {reason}"


def _ask(url: str) -> Readiness:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:  # noqa: S310 - always http
            body = answer.read()
    except urllib.error.HTTPError as error:  # not ready
        body = error.read()
    told = msgspec.json.decode(body, type=_Told)
    return Readiness(told.state, told.reason)  # type: ignore[arg-type]


def _environment() -> dict[str, str]:
    """Return this process's, without what is Ray's: its token is not for servers."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SERVE_"))}


def _swept(folder: Path) -> Path:
    """Remove what replicas that were killed have left."""
    for path in folder.iterdir():
        if path.stem.isdecimal() and start_ticks(int(path.stem)) is None:
            with contextlib.suppress(OSError):
                path.unlink()
    return folder
