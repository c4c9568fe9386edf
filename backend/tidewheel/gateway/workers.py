"""Workers of a gateway: processes that share a port, restarted when they die.

Each has a socket (SO_REUSEPORT): at a shared one, the first to wake takes a whole burst.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tidewheel.gateway.api_keys import Ledger
from tidewheel.gateway.counters import Counters
from tidewheel.gateway.gateway_options import StandaloneOptions, announce
from tidewheel.private_dir import read_value, run_dir, write_value
from tidewheel.server import ServeError
from tidewheel.server.endpoints import free_port
from tidewheel_process.child import Child, StartError
from tidewheel_process.current_process import StopSignals
from tidewheel_process.locked_folder import new_folder, remove_left_over
from tidewheel_process.restarts import RestartedChild

_START_S = 30.0
_LOOK_S = 0.1
_PREFIX = "gateway-"


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """Gateway worker and the folder in which workers share key use and counters; a single worker has none."""

    folder: Path | None = None
    index: int = 0
    num_workers: int = 1

    def ledger(self) -> Ledger:
        return Ledger() if self.folder is None else Ledger(self.folder / "ledger", self.index)

    def is_listening(self) -> bool:
        return self.folder is None or self._path(self.index).exists()

    def publish(self, counters: Counters) -> None:
        """Write the counters for other workers. On a full disk, older counters stay."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            write_value(self._path(self.index), counters)

    def before(self) -> Counters:
        """Return counters of this worker's former process, so that totals never fall."""
        counters = self._read(self.index)
        return msgspec.structs.replace(counters, num_open=0, open_upstream={})

    def others(self) -> list[Counters]:
        return [self._read(index) for index in range(self.num_workers) if index != self.index]

    def _read(self, index: int) -> Counters:
        return (None if self.folder is None else read_value(self._path(index), Counters)) or Counters()

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index}.json"


def serve_workers(options: StandaloneOptions) -> int:
    """Serve until a stop, and return the exit code. Raise `ServeError` if a worker cannot start, or `CrashLoop`."""
    remove_left_over(base := run_dir(), _PREFIX)
    with (
        StopSignals() as signals,
        _reserved(options.host, options.port) as port,
        new_folder(base, _PREFIX) as folder,
    ):
        Ledger.create(folder / "ledger")
        options = msgspec.structs.replace(options, port=port)
        workers = [GatewayWorker(folder, index, options.workers) for index in range(options.workers)]
        with _running(options, workers, signals) as children:
            _wait_listening(children, workers, signals)
            announce(options.host, port)
            while not signals.count:
                for child in children:
                    child.watch()
                time.sleep(_LOOK_S)
    return 0


def _start(options: StandaloneOptions, worker: GatewayWorker) -> Child:
    return Child([*options.command, str(worker.folder), str(worker.index)], ends_with_parent=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def _running(
    options: StandaloneOptions, workers: Sequence[GatewayWorker], signals: StopSignals
) -> Iterator[Sequence[RestartedChild]]:
    children = [
        RestartedChild(f"worker {worker.index} of the gateway", partial(_start, options, worker), _note)
        for worker in workers
    ]
    try:
        yield children
        num_asked = -1
        while not all(restarted.child.has_ended for restarted in children):
            if signals.count > num_asked:
                num_asked = signals.count
                for restarted in children:
                    restarted.child.terminate()
            time.sleep(_LOOK_S)
    finally:
        for restarted in children:
            restarted.child.kill()


def _wait_listening(
    children: Sequence[RestartedChild], workers: Sequence[GatewayWorker], signals: StopSignals
) -> None:
    try:
        for worker, restarted in zip(workers, children, strict=True):
            restarted.child.wait_ready(lambda at=worker: bool(signals.count) or at.is_listening(), _START_S)  # type: ignore[misc]
    except StartError:
        raise ServeError("a worker of the gateway could not start: its error is above") from None


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    port = free_port(host, port, "--port")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        yield port
