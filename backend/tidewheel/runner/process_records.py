"""Records that the processes of a user show each other: each writes one to a memfd, which ends with the process.

Others find it in /proc. So nothing is left of a killed process, and no lock is needed.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

log = logging.getLogger(__name__)

_SIZE = 8192  # bytes


class ProcessRecord(msgspec.Struct, frozen=True):
    pid: int


Record = TypeVar("Record", bound=ProcessRecord)


class RecordFile:
    """File with the record of this process, shown until the object or the process ends."""

    def __init__(self, name: str) -> None:
        self._file: IO[bytes] | None = None
        try:
            self._file = os.fdopen(os.memfd_create(name), "wb", buffering=0)
        except OSError as error:
            log.info("other engines cannot see what memory this one needs: %s", error)

    def write(self, record: ProcessRecord) -> None:
        if self._file is not None:
            os.pwrite(self._file.fileno(), msgspec.json.encode(record).ljust(_SIZE), 0)


def shown_records(name: str, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of living processes, those of this process included."""
    for link in map(Path, glob.iglob("/proc/[0-9]*/fd/*")):  # noqa: PTH207  # Path.glob raises when a process ends
        record = _read(link, name, kind)
        # A forked process may have inherited a record: its name is the parent's.
        if record is not None and str(record.pid) == link.parts[2]:
            yield record


def _read(link: Path, name: str, kind: type[Record]) -> Record | None:
    """Return a record of this user; others could forge records."""
    try:
        if not str(link.readlink()).startswith(f"/memfd:{name} ") or link.lstat().st_uid != os.getuid():
            return None
        with os.fdopen(os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            return msgspec.json.decode(file.read(_SIZE), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
