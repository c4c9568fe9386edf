"""Workers of a gateway: processes that share a port and are started again when they die.

Every worker listens by itself (SO_REUSEPORT): at one shared socket, the first to wake would take a whole burst.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from tidewheel.gateway.api_keys import Ledger
from tidewheel.gateway.gateway_options import StandaloneOptions, announce
from tidewheel.gateway.worker_place import WorkerPlace
from tidewheel.private_dir import run_dir
from tidewheel.server import ServeError
from tidewheel_process.child import Child
from tidewheel_process.current_process import StopSignals
from tidewheel_process.locked_folder import new_folder, remove_left_over
from tidewheel_process.restarts import RestartedChild

_START_S = 30.0
_LOOK_S = 0.1
_PREFIX = "gateway-"
_MODULE = "tidewheel.gateway.run_gateway"


def serve_workers(options: StandaloneOptions) -> int:
    """Return the exit code. Raise `ServeError` if a worker cannot start, or `CrashLoop`."""
    remove_left_over(base := run_dir(), _PREFIX)
    with (
        StopSignals() as signals,
        _reserved(options.host, options.port) as port,
        new_folder(base, _PREFIX) as folder,
    ):
        Ledger.create(folder / "ledger")
        options = msgspec.structs.replace(options, port=port)
        places = [WorkerPlace(folder, index, options.workers) for index in range(options.workers)]
        with _running(options, places, signals) as workers:
            _wait_listening(workers, places, signals)
            announce(options.host, port)
            while not signals.count:
                for worker in workers:
                    worker.watch()
                signals.wait(_LOOK_S)
    return 0


def _start(options: StandaloneOptions, place: WorkerPlace) -> Child:
    arguments = [msgspec.json.encode(one, enc_hook=str).decode() for one in (options, place)]
    return Child([sys.executable, "-P", "-m", _MODULE, *arguments], ends_with_parent=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def _running(
    options: StandaloneOptions, places: Sequence[WorkerPlace], signals: StopSignals
) -> Iterator[Sequence[RestartedChild]]:
    """Run the workers, which drain at the end of the block; another signal ends the wait for open requests."""
    workers = [
        RestartedChild(f"worker {place.index} of the gateway", partial(_start, options, place), _note)
        for place in places
    ]
    try:
        yield workers
        num_asked = -1
        while not all(worker.child.has_ended for worker in workers):
            if signals.count > num_asked:
                num_asked = signals.count
                for worker in workers:
                    worker.child.terminate()
            signals.wait(_LOOK_S)
    finally:
        for worker in workers:
            worker.child.kill()


def _wait_listening(workers: Sequence[RestartedChild], places: Sequence[WorkerPlace], signals: StopSignals) -> None:
    limit = time.monotonic() + _START_S
    while not signals.count and not all(place.is_listening() for place in places):
        if any(worker.child.has_ended for worker in workers) or time.monotonic() > limit:
            raise ServeError("a worker of the gateway could not start: its error is above")
        signals.wait(_LOOK_S)


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Hold a port on which the workers may listen too. Raise `ServeError` if the port is taken."""
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
