from __future__ import annotations

import ctypes
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")
# Parameters of glibc's mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
LARGEST_MMAP_THRESHOLD = 32 << 20


def available_host_bytes(
    memory_info: Path = MEMORY_INFO, limit: Path = CONTAINER_LIMIT, use: Path = CONTAINER_USE
) -> int | None:
    """Return the bytes that machine and container allow, if known."""
    amounts = [amount for amount in (_available(memory_info), _left(limit, use)) if amount is not None]
    return min(amounts, default=None)


def keep_freed_memory() -> None:
    """Have glibc keep what steps free, up to 1 GiB, for the next step.

    Otherwise it gives the large results of each layer back to Linux, which clears their pages anew in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


def _available(memory_info: Path) -> int | None:
    for line in _read(memory_info).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left(limit: Path, use: Path) -> int | None:
    allowed, used = _read(limit).strip(), _read(use).strip()
    if not allowed.isdecimal() or not used.isdecimal():  # "max": no limit
        return None
    return max(int(allowed) - int(used), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
