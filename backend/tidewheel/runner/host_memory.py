from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Parameters of glibc's mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
LARGEST_MMAP_THRESHOLD = 32 << 20


class _CgroupFiles(NamedTuple):
    """Names of the memory files in a cgroup's folder."""

    limit: str
    use: str
    caches: tuple[str, str]  # lines of `memory.stat`: pages of files, which Linux can drop


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _CgroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the free memory in bytes: the least of the machine's and of its cgroups'. None if Linux reports none."""
    amounts = [_available(root / "proc/meminfo"), *(_left(*group) for group in _groups(root))]
    return min((amount for amount in amounts if amount is not None), default=None)


def keep_freed_memory() -> None:
    """Have glibc keep what steps free, up to 1 GiB, for the next step.

    Otherwise it gives the large results of each layer back to Linux, which clears their pages anew in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


def _available(memory_info: Path) -> int | None:
    return _amounts(memory_info, 1024).get("MemAvailable:")


def _groups(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield this process's memory cgroups, innermost first. In a container only the mount itself may exist."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (mount / "memory", _V1) if controllers else (mount, _V2)
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                yield group, files


def _left(group: Path, files: _CgroupFiles) -> int | None:
    limit, use = (_read(group / name).strip() for name in (files.limit, files.use))
    if not limit.isdecimal() or not use.isdecimal():  # "max": no limit
        return None
    stat = _amounts(group / "memory.stat")
    return max(int(limit) - max(int(use) - sum(stat.get(name, 0) for name in files.caches), 0), 0)


def _amounts(path: Path, unit: int = 1) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
