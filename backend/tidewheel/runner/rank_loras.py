"""Adapters of a model that several ranks share: each reads its part of a folder.

The other ranks read on a thread of their own, and rank 0 uses an adapter once all have it: no step waits for a file.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tidewheel.errors import ConfigError
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.model_folder import one_line

Read = Callable[[Path], LoraWeights]
ReadOrder = tuple[int, str]  # number of the adapter, and its folder
CLOCK_TICK_S = 0.01  # changes within a tick of the kernel's clock may have one time


class LeaderLoras:
    """Adapters of rank 0, which tells the other ranks which to read and which to drop."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._numbers = itertools.count()
        self._dropped = deque[int]()  # that the other ranks still have

    def read(self, folder: Path, read: Read) -> LoraWeights:
        """Read an adapter on all ranks, for one caller at a time. Raise `ConfigError`."""
        number = next(self._numbers)
        time.sleep(CLOCK_TICK_S)  # else a change that one rank misses may leave no trace
        for connection in self._connections:
            connection.send_bytes(msgspec.msgpack.encode((number, str(folder))))
        weights, own = _read(folder, read)
        problems = [own, *(connection.recv_bytes().decode() for connection in self._connections)]
        if weights is None or any(problems):
            self._dropped.append(number)
            raise ConfigError(next(filter(None, problems)))
        weights.number = number
        weakref.finalize(weights, self._dropped.append, number)
        return weights

    def take_dropped(self) -> list[int]:
        """Return the numbers of the adapters that rank 0 has dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def serve_reads(connection: Connection, read: Read, loras: MutableMapping[int, LoraWeights]) -> None:
    """Read the adapters that rank 0 orders, into `loras` by number, until its process ends."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            number, folder = msgspec.msgpack.decode(connection.recv_bytes(), type=ReadOrder)
            weights, problem = _read(Path(folder), read)
            if weights is not None:
                loras[number] = weights
            connection.send_bytes(problem.encode())


def _read(folder: Path, read: Read) -> tuple[LoraWeights | None, str]:
    """Return a rank's part of an adapter, or None and the error."""
    try:
        return read(folder), ""
    except Exception as error:  # it must be answered
        return None, str(error) if isinstance(error, ConfigError) else f"{folder} cannot be read: {one_line(error)}"
