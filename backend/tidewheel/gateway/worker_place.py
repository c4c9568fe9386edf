"""Folder that the workers of a gateway share: the use of keys, and the counters of each worker."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidewheel.gateway.api_keys import Ledger
from tidewheel.gateway.counters import Counters


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Shared folder as one worker sees it. A single worker has none."""

    folder: Path | None = None
    index: int = 0
    num_workers: int = 1

    def ledger(self) -> Ledger:
        return Ledger() if self.folder is None else Ledger(self.folder / "ledger", self.index)

    def is_listening(self) -> bool:
        return self.folder is None or self._path(self.index).exists()

    def publish(self, counters: Counters) -> None:
        """Write this worker's counters. A full disk leaves older ones."""
        if self.folder is None:
            return
        path = self._path(self.index)
        with contextlib.suppress(OSError):
            path.with_suffix(".new").write_bytes(msgspec.json.encode(counters))
            path.with_suffix(".new").replace(path)

    def before(self) -> Counters:
        """Return the counters of a dead worker of this index: counters never go back."""
        counters = self._read(self.index)
        return msgspec.structs.replace(counters, num_open=0, open_upstream={})

    def others(self) -> list[Counters]:
        return [self._read(index) for index in range(self.num_workers) if index != self.index]

    def _read(self, index: int) -> Counters:
        if self.folder is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                return msgspec.json.decode(self._path(index).read_bytes(), type=Counters)
        return Counters()

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index}.json"
