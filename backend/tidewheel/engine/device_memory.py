"""Memory of devices that engines of one user have taken, which bounds what a new engine may be given."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.folder import label_of
from tidewheel.errors import ConfigError
from tidewheel.runner.host_memory import ProcessRecord, RecordFile, host_limits, resident_bytes, shown_records
from tidewheel.runner.info import RunnerInfo
from tidewheel.settings import shown_bytes

_NAME = "tidewheel-devices"


class DeviceUse(ProcessRecord, frozen=True):
    """Bytes that an engine has taken of its devices: its share, or without one, what its ranks hold there."""

    engine: str  # link to the model's current engine, which may load again beside itself
    since: int = 0  # monotonic ns
    bytes: dict[str, int] = msgspec.field(default_factory=dict)  # by device; of a CPU, by what limits its memory


class DeviceMemory:
    """Memory that this engine takes of its devices; one with a share takes it before the model is loaded."""

    def __init__(self, config: EngineConfig, engine: Path) -> None:
        """Raise `ConfigError` if others leave less than the share. `engine`: link to the model's current engine."""
        self._share, self._num_ranks = config.device_memory_share, config.tensor_parallel_size
        self._devices: dict[str, int] = {}  # memory by device; of a CPU, by limit
        self._use, self._record = DeviceUse(os.getpid(), str(engine)), RecordFile(_NAME)
        if config.kind == "text" and self._share is not None:
            from tidewheel.runner.device import uses_gpus  # imports torch

            self._take(is_cpu=not uses_gpus(config))

    def hold(self, info: RunnerInfo) -> None:
        """Show what the loaded engine takes. Raise `ConfigError` if it is more than the share."""
        is_cpu = info.device.startswith("cpu")
        if not self._devices:
            self._take(is_cpu=is_cpu)
        taken = info.weights_bytes + info.activation_bytes + info.kv_cache_bytes + info.graph_bytes
        if is_cpu:  # which all ranks share
            taken = self._num_ranks * max(taken, resident_bytes(os.getpid()))
        if self._share is None:
            self._show(dict.fromkeys(self._devices, taken))
        total = min(self._devices.values(), default=0)
        if self._share is not None and self._devices and taken > self._share * total:
            raise ConfigError(
                f"device_memory_share is {self._share:g} of {shown_bytes(total)}, and the engine takes "
                f"{shown_bytes(taken)}: raise it, or lower kv_cache_memory_mb or num_blocks"
            )

    def _take(self, *, is_cpu: bool) -> None:
        self._devices = host_limits() if is_cpu else gpu_bytes(self._num_ranks)
        if self._share is None:
            return
        least = min(self._devices.values(), default=0)
        totals = dict.fromkeys(self._devices, least) if is_cpu else self._devices
        self._show({device: int(self._share * total) for device, total in totals.items()})
        uses = [one for one in shown_records(_NAME, DeviceUse) if one.engine != self._use.engine]
        earlier = [one for one in uses if (one.since, one.pid) < (self._use.since, self._use.pid)]
        try:
            for device, limit in self._devices.items():
                others = [one for one in earlier if device in one.bytes]
                check_left(self._share, device, totals[device], limit, others)
        except ConfigError:
            self._show({})
            raise

    def _show(self, num_bytes: dict[str, int]) -> None:
        self._use = msgspec.structs.replace(self._use, since=time.monotonic_ns(), bytes=num_bytes)
        self._record.write(self._use)


def check_left(share: float, device: str, total: int, limit: int, others: list[DeviceUse]) -> None:
    """Raise `ConfigError` if other engines leave less of `limit` bytes than the share of `total` bytes."""
    left = max(limit - sum(one.bytes[device] for one in others), 0)
    if int(share * total) <= left:
        return
    holders = (
        f"{label_of(Path(one.engine))} (process {one.pid}) has {shown_bytes(one.bytes[device])}"
        for one in sorted(others, key=lambda one: -one.bytes[device])
    )
    place, most = "host memory" if device.startswith("cpu") else device, 100 * left // total / 100
    remedy = f"set it to at most {most:g}, or unload one of these" if most else "unload one of these"
    raise ConfigError(
        f"device_memory_share is {share:g} of {shown_bytes(total)} of {place}, and {shown_bytes(left)} are left: "
        f"{' and '.join(holders)}; {remedy}"
    )


def gpu_bytes(num_ranks: int) -> dict[str, int]:
    """Return the memory of each rank's GPU, by the name that `nvidia-smi -L` prints; empty if torch sees no GPU."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(min(num_ranks, torch.cuda.device_count())))
    return {f"GPU-{gpu.uuid}": gpu.total_memory for gpu in gpus}
