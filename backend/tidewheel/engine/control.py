from __future__ import annotations

import signal
from pathlib import Path

import zmq

from tidewheel.engine.connection import Connection
from tidewheel.engine.messages import Drain, Stats, encoder
from tidewheel.engine.process_handle import ProcessHandle
from tidewheel.engine.status import read_status
from tidewheel.stats import EngineStats


def drain(engine_dir: Path, timeout_s: float = 5.0) -> EngineStats | None:
    """Make the engine refuse new requests and return its figures. Return None without an answer in time. May be
    repeated.
    """
    status = read_status(engine_dir)
    if status is None or status.state != "ready" or not status.is_alive:
        return None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    connection = Connection(context, engine_dir, status)
    try:
        connection.send(encoder.encode(Drain()))
        answers = connection.receive(int(timeout_s * 1000))
        return next((answer.stats for answer in answers if isinstance(answer, Stats)), None)
    finally:
        connection.close()
        context.term()


def stop(engine_dir: Path, timeout_s: float = 5.0) -> bool:
    """End the engine and return whether one ran. Ask first, so that its requests get an answer, and kill it after
    `timeout_s`.
    """
    status = read_status(engine_dir)
    if status is None or not status.is_alive:
        return False
    handle = ProcessHandle(status.pid, status.start_ticks)
    try:
        handle.end(signal.SIGTERM, timeout_s)
    finally:
        handle.close()
    return True
