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
from tidewheel.models.lora_folder import CONFIG_NAME, WEIGHTS_NAME, LoraWeights
from tidewheel.models.model_folder import one_line

Read = Callable[[Path], LoraWeights]
FileState = tuple[int, int, int]  # inode, bytes, and the time of the last change in ns
ReadOrder = tuple[int, str, list[FileState]]  # number of the adapter, its folder, and the files in it
CLOCK_TICK_S = 0.01  # changes within a tick of the kernel's clock may have one time


class LeaderLoras:
    """Adapters of rank 0, which tells the other ranks which to read and which to drop."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._next_numbers = itertools.count()
        self._numbers = weakref.WeakKeyDictionary[LoraWeights, int]()
        self._dropped = deque[int]()  # that the other ranks still have

    def read(self, folder: Path, read: Read) -> LoraWeights:
        """Read an adapter on all ranks, for one caller at a time. Raise `ConfigError`."""
        order = number, *_ = next(self._next_numbers), str(folder), _files(folder)
        time.sleep(CLOCK_TICK_S)  # any rank sees a change from here on
        for connection in self._connections:
            connection.send_bytes(msgspec.msgpack.encode(order))
        weights, own = _read(order, read)
        problems = [own, *(connection.recv_bytes().decode() for connection in self._connections)]
        if weights is None or any(problems):
            self._dropped.append(number)
            raise ConfigError(next(filter(None, problems)))
        self._numbers[weights] = number
        weakref.finalize(weights, self._dropped.append, number)
        return weights

    def number(self, weights: LoraWeights) -> int:
        return self._numbers[weights]

    def take_dropped(self) -> list[int]:
        """Return the numbers of the adapters that rank 0 has dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def serve_reads(connection: Connection, read: Read, loras: MutableMapping[int, LoraWeights]) -> None:
    """Read the adapters that rank 0 orders, into `loras` by number, until its process ends."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            order = msgspec.msgpack.decode(connection.recv_bytes(), type=ReadOrder)
            weights, problem = _read(order, read)
            if weights is not None:
                loras[order[0]] = weights
            connection.send_bytes(problem.encode())


def _read(order: ReadOrder, read: Read) -> tuple[LoraWeights | None, str]:
    """Return a rank's part of an adapter, or None and the error."""
    _, name, files = order
    try:
        weights = read(folder := Path(name))
    except Exception as error:  # it must be answered
        return None, str(error) if isinstance(error, ConfigError) else f"{name} cannot be read: {one_line(error)}"
    if _files(folder) != files:
        return None, f"{name} changed while it was read: load it again"
    return weights, ""


def _files(folder: Path) -> list[FileState]:
    with contextlib.suppress(OSError):  # the reader says what is wrong
        stats = [(folder / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
        return [(stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in stats]
    return []
