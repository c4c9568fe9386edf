"""Free host memory, and the claims by which engines share it.

Linux counts memory once it is written, and a cache fills slowly. So each engine shows others a claim until it ends.

A process writes each of its records to a memfd, which others of the same user find in /proc. So nothing is left of a
killed process, and no lock is needed.
"""

import ctypes
import glob
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

log = logging.getLogger(__name__)

RECORD_BYTES = 8192
# glibc's mallopt(3)
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
LARGEST_MMAP_THRESHOLD = 32 << 20


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the least free host memory, in bytes, of machine and cgroups."""
    of_machine = 1024 * _amounts(root / "proc/meminfo")["MemAvailable:"]
    return min([of_machine, *(left for group in _groups(root) if (left := _left(group)) is not None)])


def total_host_bytes(root: Path = Path("/")) -> int:
    """Return the least host memory, in bytes, of machine and cgroups."""
    return min(host_limits(root).values())


def host_limits(root: Path = Path("/")) -> dict[str, int]:
    """Return the memory of the machine, in bytes, and of each cgroup with less, by a name that all processes use."""
    of_machine = 1024 * _amounts(root / "proc/meminfo")["MemTotal:"]
    limits = {"cpu": of_machine}
    for group in _groups(root):
        limit = _read(group / "memory.max").strip()
        if limit.isdecimal() and int(limit) < of_machine:  # a path is another in each namespace, an inode is not
            limits[f"cpu {group.stat().st_ino}"] = int(limit)
    return limits


def keep_freed_memory() -> None:
    """Make glibc keep up to 1 GiB of freed memory: else Linux clears each layer's pages in every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup, of version 2, and of those that it is in."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = mount / line.removeprefix("0::").lstrip("/")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount))


def _left(group: Path) -> int | None:
    limit, use = (_read(group / name).strip() for name in ("memory.max", "memory.current"))
    if not limit.isdecimal() or not use.isdecimal():  # "max": no limit
        return None
    stat = _amounts(group / "memory.stat")
    droppable = stat.get("active_file", 0) + stat.get("inactive_file", 0)
    return max(int(limit) - max(int(use) - droppable, 0), 0)


def _amounts(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


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
            os.pwrite(self._file.fileno(), msgspec.json.encode(record).ljust(RECORD_BYTES), 0)


def shown_records(name: str, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of living processes, those of this process included."""
    for link in map(Path, glob.iglob("/proc/[0-9]*/fd/*")):  # noqa: PTH207  # Path.glob raises when a process ends
        record = _read_record(link, name, kind)
        # A forked process may have inherited a record: its name is the parent's.
        if record is not None and str(record.pid) == link.parts[2]:
            yield record


def _read_record(link: Path, name: str, kind: type[Record]) -> Record | None:
    """Return a record of this user; others could forge records."""
    try:
        if not str(link.readlink()).startswith(f"/memfd:{name} ") or link.lstat().st_uid != os.getuid():
            return None
        with os.fdopen(os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            return msgspec.json.decode(file.read(RECORD_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


_NAME = "tidewheel-memory"
_LEAST_SHARE = 4  # a new engine gets at least 1 / 4 of free memory
_PAGE = os.sysconf("SC_PAGESIZE")


class ClaimRecord(ProcessRecord, frozen=True):
    """Bytes of host memory that the engine of process `pid` uses or will use."""

    base: int  # bytes before the load
    others: int = 0  # bytes beside the cache
    cache: int = 0  # bytes
    takes_share: bool = False  # of free memory, without a setting
    began: int = 0  # monotonic ns
    sized: int = 0  # monotonic ns; 0: not yet


class SpareMemory(NamedTuple):
    bytes: int
    num_engines: int  # that share free memory


class MemoryClaim:
    def __init__(self, *, takes_share: bool, others: int, num_ranks: int = 1) -> None:
        """`num_ranks`: those of the engine, which share the memory."""
        self.base, self._num_ranks = resident_bytes(os.getpid()), num_ranks
        self._claim = ClaimRecord(os.getpid(), self.base, others, takes_share=takes_share, began=time.monotonic_ns())
        self._record = RecordFile(_NAME)
        self._record.write(self._claim)

    def spare(self, available: int, others: int) -> SpareMemory:
        """Return the cache's part of `available` bytes; `others`: weights, activations, host tier."""
        self._claim = mine = msgspec.structs.replace(self._claim, others=others)
        if mine.takes_share:
            claims = defaultdict(list, {mine.pid: [mine]})
            for claim in shown_records(_NAME, ClaimRecord):  # other ranks' are among those that share
                if (claim.pid, claim.began) != (mine.pid, mine.began):
                    claims[claim.pid].append(claim)
            return spare_memory(mine, claims, available)
        # A fixed cache is compared with free memory: other claims may stay unused.
        return SpareMemory(max(available - _growth(mine), 0) // self._num_ranks, 1)

    def take(self, cache: int) -> None:
        self._claim = msgspec.structs.replace(self._claim, cache=cache, sized=time.monotonic_ns())
        self._record.write(self._claim)


def spare_memory(mine: ClaimRecord, claims: dict[int, list[ClaimRecord]], available: int) -> SpareMemory:
    """Return the part of `available` bytes for this engine's cache. `claims`: by process id, with `mine`.

    Subtract what engines claim but do not hold yet. Engines that size caches at the same time share the rest equally.
    """
    num_engines, growth = 0, 0
    for pid, of_process in claims.items():
        expected = min(claim.base for claim in of_process)
        for claim in of_process:
            loads_too = claim.takes_share and (not claim.sized or claim.sized > mine.began)
            num_engines += loads_too
            expected += claim.others + (0 if loads_too else claim.cache)
        growth += max(expected - resident_bytes(pid), 0)
    unclaimed = max(available - growth, (available - _growth(mine)) // _LEAST_SHARE, 0)
    return SpareMemory(unclaimed // num_engines, num_engines)


def _growth(mine: ClaimRecord) -> int:
    return max(mine.base + mine.others - resident_bytes(mine.pid), 0)


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
