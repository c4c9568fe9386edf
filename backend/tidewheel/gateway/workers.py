"""Workers of a gateway: processes that share a port, and are started again when they die.

The kernel shares connections out. Every worker listens by itself (SO_REUSEPORT): at one shared socket, the first to
wake would take a whole burst. Limits of keys hold for all together, and `/metrics` is their sum (`worker_place.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tidewheel.gateway.gateway_options import StandaloneOptions, announce
from tidewheel.gateway.ledger import Ledger
from tidewheel.gateway.worker_place import WorkerPlace
from tidewheel.private_dir import run_dir
from tidewheel.server import ServeError, processes
from tidewheel.server.revival import Restarts
from tidewheel.server.workdir import LOCK, is_left_over

_START_S = 30.0
_LOOK_S = 0.1
_PREFIX = "gateway-"
_MODULE = "tidewheel.gateway.one_worker"


def serve_workers(options: StandaloneOptions) -> int:
    """Return the exit code. Raise `ServeError` if they cannot start, or die again and again."""
    with (
        processes.StopSignals() as signals,
        _reserved(options.host, options.port) as port,
        _folder(run_dir()) as folder,
    ):
        Ledger.create(folder / "ledger")
        options = msgspec.structs.replace(options, port=port)
        places = [WorkerPlace(folder, index, options.workers) for index in range(options.workers)]
        with _running([_Worker(options, place) for place in places], signals) as workers:
            _wait_listening(workers, signals)
            announce(options.host, port)
            while not signals.count:
                for worker in workers:
                    worker.watch()
                _wait(signals)
    return 0


class _Worker:
    def __init__(self, options: StandaloneOptions, place: WorkerPlace) -> None:
        order = [msgspec.json.encode(one, enc_hook=str).decode() for one in (options, place)]
        self._command = [sys.executable, "-P", "-m", _MODULE, *order]
        self._place = place
        self._restarts = Restarts()
        self._start_at = 0.0  # of the next one, after a death
        self._start()

    @property
    def is_listening(self) -> bool:
        return self._place.is_listening()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def watch(self) -> None:
        """Start it again some time after it died. Raise `CrashLoop` after too many deaths."""
        now = time.monotonic()
        if self._start_at:
            if now >= self._start_at:
                self._start()
        elif self.has_ended:
            reason = f"worker {self._place.index} of the gateway died (exit code {self._process.returncode})"
            print(f"{reason}; starting it again", file=sys.stderr, flush=True)  # noqa: T201
            self._start_at = now + self._restarts.next_delay_s(now - self._started_at, reason)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        # In its own session: Ctrl-C reaches only this process, which passes it on once.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            self._command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.end_with_parent,
        )
        self._started_at, self._start_at = time.monotonic(), 0.0


@contextlib.contextmanager
def _running(workers: Sequence[_Worker], signals: processes.StopSignals) -> Iterator[Sequence[_Worker]]:
    """End them with the block, and let them drain. Another signal ends the wait for open requests."""
    try:
        yield workers
        for worker in workers:
            worker.terminate()
        count = signals.count
        while not all(worker.has_ended for worker in workers):
            _wait(signals)
            if signals.count > count:
                count = signals.count
                for worker in workers:
                    worker.terminate()
    finally:
        for worker in workers:
            worker.kill()


def _wait(signals: processes.StopSignals) -> None:
    select.select([signals], [], [], _LOOK_S)
    signals.clear()


def _wait_listening(workers: Sequence[_Worker], signals: processes.StopSignals) -> None:
    limit = time.monotonic() + _START_S
    while not signals.count and not all(worker.is_listening for worker in workers):
        if any(worker.has_ended for worker in workers) or time.monotonic() > limit:
            raise ServeError("a worker of the gateway could not start: its error is above")
        _wait(signals)


@contextlib.contextmanager
def _folder(base: Path) -> Iterator[Path]:
    """Make a folder that is locked while this process lives. Remove those of killed gateways."""
    for left_over in filter(is_left_over, base.glob(f"{_PREFIX}*")):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base) as made, (Path(made) / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(made)


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Hold a port that the workers may listen on too. Raise `ServeError` if another process listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = int(probe.getsockname()[1])
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    with held:
        yield port
