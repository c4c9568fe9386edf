"""Size of the host tier, checked against available memory."""

from __future__ import annotations

from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.runner.kv_tensors import MIB, CacheLayout

GIB = 1 << 30

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")


def decide_num_host_blocks(swap_space: float, layout: CacheLayout, available_bytes: int | None) -> int:
    """Return the blocks in `swap_space` GiB. Raise `ConfigError` if below one block or above available memory."""
    if swap_space == 0.0:
        return 0
    num_bytes = int(swap_space * GIB)
    if available_bytes is not None and num_bytes > available_bytes:
        raise ConfigError(
            f"swap_space is {swap_space:g} GiB, but {available_bytes / GIB:.1f} GiB of host memory are available: "
            "lower it"
        )
    num_blocks = num_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space is {swap_space:g} GiB, which does not hold one block of {layout.block_bytes / MIB:.1f} MiB: "
            "raise it, or set it to 0"
        )
    return num_blocks


def available_host_bytes(
    memory_info: Path = MEMORY_INFO, limit: Path = CONTAINER_LIMIT, use: Path = CONTAINER_USE
) -> int | None:
    """Return the bytes that machine and container allow, if known."""
    amounts = [amount for amount in (_available(memory_info), _left(limit, use)) if amount is not None]
    return min(amounts, default=None)


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
        return path.read_text()
    except OSError:
        return ""
