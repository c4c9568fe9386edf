from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

import msgspec
import zmq

from tidewheel.engine.messages import FromEngine, from_engine_decoder
from tidewheel.engine.process_handle import ProcessHandle
from tidewheel.engine.run_dir import socket_address
from tidewheel.engine.status import Status

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1 << 16  # messages per direction
MAX_MESSAGES = 1024  # per `receive`
LAST_WORDS_MS = 100  # a dead engine's messages may still be in ZeroMQ's thread
DUMP_GRACE_S = 0.5


class Connection:
    """DEALER socket and process handle of one engine. A lost connection is never reused."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine_dir: Path, status: Status) -> None:
        self.process = ProcessHandle(status.pid, status.start_ticks)
        self.last_heard = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, QUEUE_LIMIT)
        self._socket.set(zmq.RCVHWM, QUEUE_LIMIT)
        self._socket.set(zmq.LINGER, 200)
        self._socket.connect(socket_address(engine_dir))

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)
        if self.process.fileno is not None:
            poller.register(self.process.fileno, zmq.POLLIN)

    def send(self, payload: bytes) -> bool:
        """Return False if the engine is too far behind to take it."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int = 0) -> list[FromEngine]:
        """Return arrived messages. Wait at most `timeout_ms` for the first."""
        messages: list[FromEngine] = []
        while len(messages) < MAX_MESSAGES and self._socket.poll(0 if messages else timeout_ms):
            payload = self._socket.recv(zmq.NOBLOCK)
            try:
                messages.append(from_engine_decoder.decode(payload))
            except msgspec.MsgspecError:
                log.exception("ignored a malformed message of the engine")
        if messages:
            self.last_heard = time.monotonic()
        return messages

    def last_words(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        while more := self.receive(LAST_WORDS_MS):
            messages += more
        return messages

    def kill_hung_engine(self) -> None:
        """Kill the engine. First its log gets the stacks of its threads."""
        self.process.end(signal.SIGUSR1, DUMP_GRACE_S)

    def close(self) -> None:
        self.process.close()
        self._socket.close()
