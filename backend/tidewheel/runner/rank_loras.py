"""Adapters of a model that several ranks share: each reads its part of a folder.

Ranks 1 and up read on a thread of their own, and rank 0 takes an adapter that all have: no step waits for a file.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.model_folder import one_line

Read = Callable[[Path], LoraWeights]


class ReadOrder(msgspec.Struct, array_like=True):
    number: int  # of the adapter
    folder: str


class ReadAnswer(msgspec.Struct, array_like=True):
    problem: str = ""
    files: list[tuple[str, int, int, int]] = []  # name, inode, size and time of the last change, in ns


_encode = msgspec.msgpack.Encoder().encode
_orders, _answers = msgspec.msgpack.Decoder(ReadOrder), msgspec.msgpack.Decoder(ReadAnswer)


class LeaderLoras:
    """Rank 0's side."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._unused = itertools.count()
        self._numbers = weakref.WeakKeyDictionary[LoraWeights, int]()
        self._dropped = deque[int]()  # that the other ranks still have

    def read(self, folder: Path, read: Read) -> LoraWeights:
        """Read an adapter on all ranks, for one caller at a time. Raise `ConfigError`."""
        number = next(self._unused)
        for connection in self._connections:
            connection.send_bytes(_encode(ReadOrder(number, str(folder))))
        weights, own = _read(folder, read)
        answers = [own, *(_answers.decode(connection.recv_bytes()) for connection in self._connections)]
        problems = [answer.problem for answer in answers if answer.problem]
        if any(answer != own for answer in answers):
            problems.append(_changed(folder))
        if problems or weights is None:
            self._dropped.append(number)
            raise ConfigError(problems[0])
        self._numbers[weights] = number
        weakref.finalize(weights, self._dropped.append, number)
        return weights

    def number(self, weights: LoraWeights) -> int:
        return self._numbers[weights]

    def take_dropped(self) -> list[int]:
        """Return the adapters that rank 0 has dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def serve_reads(connection: Connection, read: Read, loras: MutableMapping[int, LoraWeights]) -> None:
    """Read what rank 0 orders into `loras`, by number, until its process ends."""
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            order = _orders.decode(connection.recv_bytes())
            weights, answer = _read(Path(order.folder), read)
            if weights is not None:
                loras[order.number] = weights
            connection.send_bytes(_encode(answer))


def _read(folder: Path, read: Read) -> tuple[LoraWeights | None, ReadAnswer]:
    """Read a rank's part. The files in the answer are those of the part, or it is a problem."""
    try:
        before = _files(folder)
        weights = read(folder)
        if _files(folder) != before:
            return None, ReadAnswer(_changed(folder))
    except TidewheelError as error:
        return None, ReadAnswer(str(error))
    except Exception as error:  # it must be answered
        return None, ReadAnswer(f"{folder} cannot be read: {one_line(error)}")
    return weights, ReadAnswer(files=before)


def _files(folder: Path) -> list[tuple[str, int, int, int]]:
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return [(name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in found]


def _changed(folder: Path) -> str:
    return f"{folder} changed while it was read: load it again"
