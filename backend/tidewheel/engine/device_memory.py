"""Memory of devices that engines of one user have taken, which bounds what a new engine may be given."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import msgspec

from tidewheel.config import EngineConfig, MemoryLimit
from tidewheel.engine.folder import label_of
from tidewheel.errors import ConfigError
from tidewheel.runner.host_memory import resident_bytes, total_host_bytes
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.process_records import ProcessRecord, shown_records
from tidewheel.settings import MIB, shown_bytes

_NAME = "tidewheel-devices"


class DeviceUse(msgspec.Struct, frozen=True):
    """Bytes that an engine has taken of its devices: its limit, or without one, what its ranks hold there."""

    pid: int
    engine: str  # link to the model's current engine, which may load again beside itself
    since: int = 0  # monotonic ns
    bytes: dict[str, int] = {}  # by device


class DeviceMemory:
    """Memory that this engine takes of its devices; one with a limit takes it before the model is loaded."""

    def __init__(self, config: EngineConfig, engine: Path) -> None:
        """Raise `ConfigError` if others leave less than the limit. `engine`: link to the model's current engine."""
        self._config, self._devices = config, dict[str, int]()  # memory by device
        self._use = DeviceUse(os.getpid(), str(engine))
        self._record = ProcessRecord[DeviceUse](_NAME)
        if config.kind == "text" and config.memory_limit(0) is not None:
            from tidewheel.runner.device import uses_gpus  # imports torch

            self._reserve(is_cpu=not uses_gpus(config))

    def hold(self, info: RunnerInfo) -> None:
        """Show what the loaded engine takes. Raise `ConfigError` if it is more than the limit."""
        is_cpu = info.device.startswith("cpu")
        if not self._devices:
            self._reserve(is_cpu=is_cpu)
        taken = info.weights_bytes + info.activation_bytes + info.kv_cache_bytes + info.graph_bytes
        if is_cpu:  # which all ranks share
            taken = self._config.tensor_parallel_size * max(taken, resident_bytes(os.getpid()))
        for device, total in self._devices.items():
            limit = self._config.memory_limit(total)
            if limit is None:
                self._show({**self._use.bytes, device: taken})
            elif taken > limit.bytes:
                raise ConfigError(
                    f"{limit}, and the engine takes {shown_bytes(taken)}: raise it, or lower kv_cache_memory_mb or "
                    "num_blocks"
                )

    def _reserve(self, *, is_cpu: bool) -> None:
        self._devices = {"cpu": total_host_bytes()} if is_cpu else gpu_bytes(self._config.tensor_parallel_size)
        limits = [(device, self._config.memory_limit(total)) for device, total in self._devices.items()]
        self._show({device: limit.bytes for device, limit in limits if limit is not None})
        for device, limit in limits:
            if limit is not None:
                check_left(
                    limit, device, [one for one in shown_records(_NAME, DeviceUse) if self._yields(one, device)]
                )

    def _yields(self, other: DeviceUse, device: str) -> bool:
        """Return whether another model's engine has taken memory of the device before this engine."""
        is_earlier = (other.since, other.pid) < (self._use.since, self._use.pid)
        return is_earlier and other.engine != self._use.engine and device in other.bytes

    def _show(self, num_bytes: dict[str, int]) -> None:
        self._use = msgspec.structs.replace(self._use, since=time.monotonic_ns(), bytes=num_bytes)
        self._record.write(self._use)


def check_left(limit: MemoryLimit, device: str, others: list[DeviceUse]) -> None:
    """Raise `ConfigError` if other engines leave less of the device than the limit."""
    left = max(limit.device_bytes - sum(one.bytes[device] for one in others), 0)
    if limit.bytes <= left:
        return
    holders = " and ".join(
        f"{label_of(Path(one.engine))} (process {one.pid}) has {shown_bytes(one.bytes[device])}" for one in others
    )
    most = math.floor(100 * left / limit.device_bytes) / 100 if limit.is_share else left // MIB
    remedy = f"set it to at most {most:g}, or unload" if most else "unload"
    raise ConfigError(
        f"{limit} of {'host memory' if device == 'cpu' else device}, and {shown_bytes(left)} are left: {holders}; "
        f"{remedy} one of these"
    )


def gpu_bytes(num_ranks: int) -> dict[str, int]:
    """Return the memory of each rank's GPU, by the name that `nvidia-smi -L` prints; empty if torch sees no GPU."""
    import torch

    count = min(num_ranks, torch.cuda.device_count())
    gpus = (torch.cuda.get_device_properties(rank) for rank in range(count))
    return {f"GPU-{gpu.uuid}": gpu.total_memory for gpu in gpus}
