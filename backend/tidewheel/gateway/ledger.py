"""Use of every API key: in memory, or in a file that all workers of a gateway share."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidewheel.errors import ConfigError

MAX_WORKERS = 64
MAX_KEYS = 1 << 16
_OFFSET = 4096  # of the rows, behind their number
_ROW = np.dtype(
    [
        ("sha256", "S64"),
        ("spent", "f8"),  # requests that count for the rate; zero after an idle minute
        ("spent_at", "f8"),  # monotonic seconds, the same in all processes
        ("num_open", "i4", (MAX_WORKERS,)),  # by worker
    ]
)


class Ledger:
    """Rows by key. They only become more; a file has zeros at first, and takes no room for them."""

    def __init__(self, path: Path | None = None, worker: int = 0) -> None:
        """A worker that is started again has no open requests."""
        self.worker = worker
        self._file = None if path is None else path.open("r+b")
        if path is None:
            self._count, self._rows = np.zeros(1, np.int64), np.zeros(MAX_KEYS, _ROW)
        else:
            self._count = np.memmap(path, np.int64, "r+", shape=(1,))
            self._rows = np.memmap(path, _ROW, "r+", _OFFSET, (MAX_KEYS,))
        with self.locked():
            self._rows["num_open"][: int(self._count[0]), worker] = 0

    @staticmethod
    def create(path: Path) -> None:
        with path.open("xb") as file:
            file.truncate(_OFFSET + MAX_KEYS * _ROW.itemsize)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other workers out. The kernel frees the lock of one that dies."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def rows(self, hashes: Sequence[str]) -> Iterable[Any]:
        """Return a record for each hash. Raise `ConfigError` if there have been too many."""
        with self.locked():
            count = int(self._count[0])
            known = {text: index for index, text in enumerate(self._rows["sha256"][:count].tolist())}
            indices = [known.setdefault(text.encode(), len(known)) for text in hashes]
            if len(known) > MAX_KEYS:
                raise ConfigError(f"there have been more than {MAX_KEYS} keys: start the gateway again")
            self._rows["sha256"][count : len(known)] = list(known)[count:]
            self._count[0] = len(known)
        return [self._rows[index] for index in indices]
