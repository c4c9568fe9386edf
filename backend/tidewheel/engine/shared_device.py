"""Devices that engines share: their turns, by class, weight and measured time, and their memory.

Engines of one user meet in a table of the device: a file in shared memory that all map, with a row for each. The
engine whose step runs holds a lock; a pipe wakes a waiting engine. Linux frees both when a process is killed.
"""

import contextlib
import fcntl
import logging
import math
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from tidewheel.config import EngineConfig
from tidewheel.engine.folder import label_of
from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.runner.host_memory import ProcessRecord, RecordFile, host_limits, resident_bytes, shown_records
from tidewheel.runner.info import RunnerInfo
from tidewheel.settings import shown_bytes
from tidewheel_process.locked_folder import FolderError, flock, make_private, try_lock

log = logging.getLogger(__name__)

DEVICES = Path(f"/dev/shm/tidewheel-{os.getuid()}-devices-2")  # noqa: S108 - mode 0700; the number is of the layout
MAX_ENGINES = 32
JOIN_LIMIT_S = 5.0
LOOK_S = 1.0  # between looks for engines that ended
WAKE_S = 0.01  # longest sleep of a waiting engine
STALE_S = 0.1  # after which a waiting engine that does not look is passed over
RETURN_S = 0.001  # time that an engine between two steps has for the next
OVERDUE_S = 1.0  # length of a step whose end others do not wait for
AGEING_S = 0.5  # wait that lifts an engine by a class
CREDIT_S = 0.2  # most that an engine saves up by using less than others, in seconds of LOW
RECENT_S = 1.0  # how long an engine's class cuts the prompts of others

_ROW = np.dtype(
    [
        ("name", "S64"),  # of the model's folder; empty: a free row
        ("cores", "f8"),  # part of the device that a step takes
        ("class", "i8"),  # best one, when the engine last looked
        ("waits", "i8"),  # its class while it waits; else 0
        ("since", "f8"),
        ("seen", "f8"),
        ("returns_at", "f8"),  # until then, the engine is between two steps
        ("used_s", "f8"),  # seconds of steps / weights of engine and class
    ]
)
_HEADER = np.dtype([("num_changes", "i8"), ("granted_at", "f8"), ("used_s", "f8")])

_LAST = (math.inf, math.inf, -1)
_USES = "tidewheel-devices"


class UnsharedDevice:
    """Device of one engine alone, which takes no turns."""

    waited_s = 0.0  # for turns

    @property
    def slice_s(self) -> float | None:
        """Return the longest time of the next step; None: no limit."""
        return None

    def take(self, best_class: Callable[[], int]) -> bool:  # noqa: ARG002
        """Take the turn, if it is this engine's. `best_class`: of its requests; 0: none."""
        return True

    def give_back(self, *, ran: bool) -> None: ...

    def wait(self, socket: zmq.Socket[bytes], timeout_ms: int) -> None:
        socket.poll(timeout_ms)

    def close(self) -> None: ...


class DeviceShare(NamedTuple):
    name: str  # of the model's folder
    cores: float = 1.0  # part of the device that a step takes; 0: the engine takes no turns
    weight: float = 1.0
    slice_s: float = 0.02
    is_one_shot: bool = False


class DeviceArbiter(UnsharedDevice):
    """One engine's view of the table. Engines whose steps together fit the device take no turns.

    Next is the waiting engine of the best class, of these the one that used least time by weight, doubled by each
    class above LOW. After its step, an engine may take the next turn for `RETURN_S`, unless one that waits has a
    better class or used less.
    """

    def __init__(self, base: Path, share: DeviceShare, clock: Callable[[], float] = time.monotonic) -> None:
        """`base`: path of the device's files, without suffix. Raise OSError."""
        self._base, self._share, self._clock = base, share, clock
        self._is_shared = self._holds = False
        self._next_look = self._began = 0.0
        self._engines: list[int] = []  # rows
        with try_lock(base.with_suffix(".lock"), JOIN_LIMIT_S) or _refuse(f"{base}.lock is held"):
            memory = _map(base.with_suffix(".table"), _HEADER.itemsize + MAX_ENGINES * _ROW.itemsize)
            self._header = np.frombuffer(memory, _HEADER, 1)
            self._rows = np.frombuffer(memory, _ROW, MAX_ENGINES, _HEADER.itemsize)
            self._row = self._free_row()
            self._pipe_path(self._row).unlink(missing_ok=True)
            os.mkfifo(self._pipe_path(self._row), 0o600)
            self._pipe = os.open(self._pipe_path(self._row), os.O_RDWR | os.O_NONBLOCK)
            self._turn = base.with_suffix(".turn").open("ab")
            self._rows[self._row] = (share.name.encode(), share.cores, 0, 0, 0.0, 0.0, 0.0, 0.0)
            self._header["num_changes"] += 1
            self._num_changes = -1

    @property
    def slice_s(self) -> float | None:
        """Return the longest time of the next step: for a language model, only while others of a better class run."""
        is_recent = self._rows["seen"] > self._clock() - RECENT_S
        is_better = self._rows["class"] < self._rows["class"][self._row]
        is_cut = self._is_shared and (self._share.is_one_shot or (is_recent & is_better).any())
        return self._share.slice_s if is_cut else None

    def take(self, best_class: Callable[[], int]) -> bool:
        now, me, rows = self._clock(), self._row, self._rows
        if now >= self._next_look or self._header["num_changes"][0] != self._num_changes:
            self._look(now)
        if not self._is_shared:
            return True
        service_class = best_class()
        if not service_class:
            self._stand_back(now)
            return False
        rows["class"][me], rows["seen"][me] = service_class, now
        if self._holds:
            self._charge(now)
        elif not rows["waits"][me]:
            self._begin_to_wait(now)
        rows["waits"][me] = service_class
        is_next = self._next(now) == me and (self._holds or self._grant(now))
        if is_next or self._holds:
            rows["waits"][me] = 0
        return is_next

    def give_back(self, *, ran: bool) -> None:
        if not self._holds:
            return
        now = self._clock()
        self._charge(now)
        self._rows["returns_at"][self._row] = now + RETURN_S if ran else 0.0
        self._header["granted_at"] = math.inf
        self._holds = False
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        self._wake_next(now)

    def wait(self, socket: zmq.Socket[bytes], timeout_ms: int) -> None:
        """Wait for a message or, if the engine waits for its turn, for that."""
        if not (self._is_shared and self._rows["waits"][self._row]):
            socket.poll(timeout_ms)
            return
        zmq.select([socket, self._pipe], [], [], WAKE_S)
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, mmap.PAGESIZE)

    def close(self) -> None:
        self.give_back(ran=False)
        self._stand_back(self._clock())
        self._rows["name"][self._row] = b""
        self._header["num_changes"] += 1
        self._turn.close()
        os.close(self._pipe)

    def _begin_to_wait(self, now: float) -> None:
        mine = self._rows[self._row]
        if mine["returns_at"] <= now:  # it was idle, and saved no time for later
            mine["used_s"] = max(mine["used_s"], self._header["used_s"][0])
        mine["since"], mine["returns_at"] = now, 0.0

    def _grant(self, now: float) -> bool:
        if not flock(self._turn, fcntl.LOCK_EX):
            return bool(now - self._header["granted_at"][0] > OVERDUE_S)
        self._holds, self._began, self._header["granted_at"] = True, now, now
        self.waited_s += float(now - self._rows["since"][self._row])
        mine, last = self._rows[self._row], self._header["used_s"][0]
        mine["used_s"] = max(mine["used_s"], last - CREDIT_S)
        self._header["used_s"] = max(last, mine["used_s"])
        return True

    def _charge(self, now: float) -> None:
        weight = self._share.weight * 2.0 ** (Priority.LOW - self._rows["class"][self._row])
        self._rows["used_s"][self._row] += (now - self._began) / weight
        self._began = self._header["granted_at"][0] = now

    def _stand_back(self, now: float) -> None:
        mine = self._rows[self._row]
        if mine["waits"] or mine["returns_at"]:
            mine["waits"], mine["returns_at"] = 0, 0.0
            self._wake_next(now)

    def _next(self, now: float) -> int | None:
        """Return the row whose turn is next; None: no engine waits, or one between two steps comes first."""
        returns_at, classes, used = (self._rows[name] for name in ("returns_at", "class", "used_s"))
        service_class, used_s, first = min([self._rank(row, now) for row in self._engines], default=_LAST)
        for row in self._engines:
            if returns_at[row] > now and classes[row] <= service_class and used[row] < used_s:
                return None
        return None if first < 0 else first

    def _rank(self, row: int, now: float) -> tuple[float, float, int]:
        """Return class, use and row of an engine; `_LAST` if it does not wait, or has stopped looking."""
        _, _, _, waits, since, seen, _, used_s = self._rows.item(row)
        if not waits or seen < now - STALE_S:
            return _LAST
        return max(waits - (now - since) // AGEING_S, Priority.CRITICAL), used_s, row

    def _wake_next(self, now: float) -> None:
        if (row := self._next(now)) is not None:
            self._wake(row)

    def _wake(self, row: int) -> bool:
        """Wake an engine. Return whether it lives: a pipe that no process reads cannot be opened."""
        try:
            pipe = os.open(self._pipe_path(row), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # full, if the engine does not wait
            os.write(pipe, b"!")
        os.close(pipe)
        return True

    def _look(self, now: float) -> None:
        self._next_look, self._num_changes = now + LOOK_S, self._header["num_changes"][0]
        others = self._others()
        cores = self._rows["cores"]
        is_shared = bool(others) and self._share.cores > 0.0 and cores[[self._row, *others]].sum() > 1.0
        if is_shared != self._is_shared:
            names = ", ".join(self._rows["name"][row].decode() for row in others)
            log.info("takes turns on %s with %s" if is_shared else "takes no turns on %s%.0s", self._base.name, names)
        self._is_shared, self._engines = is_shared, [self._row, *others]

    def _others(self) -> list[int]:
        """Return the rows of other engines that live."""
        names = self._rows["name"].tolist()  # numpy's searches fail if another process writes
        return [row for row, name in enumerate(names) if name and row != self._row and self._wake(row)]

    def _free_row(self) -> int:
        self._row = -1
        others = self._others()
        free = [row for row in range(MAX_ENGINES) if row not in others]
        return free[0] if free else _refuse(f"{MAX_ENGINES} engines share it already")

    def _pipe_path(self, row: int) -> Path:
        return self._base.with_suffix(f".{row}")


def share_device(config: EngineConfig, info: RunnerInfo, folder: Path, name: str) -> UnsharedDevice:
    """Join the engines of a model's device. `folder`: of the tables; `name`: of the model's folder."""
    is_cpu = info.device.startswith("cpu")
    number = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]) or "0"
    threads, slice_s = re.search(r"\d+", info.device) if is_cpu else None, 1e-3 * config.device_slice_ms
    num_threads = config.tensor_parallel_size * int(threads.group()) if threads else 0
    cores = min(num_threads / len(os.sched_getaffinity(0)), 1.0) if threads else 1.0
    share = DeviceShare(
        name, cores if slice_s else 0.0, config.device_weight, slice_s, is_one_shot=config.kind != "text"
    )
    try:
        base = make_private(folder, "it is removed") / ("cpu" if is_cpu else f"cuda-{number}")
        return DeviceArbiter(base, share)
    except (OSError, FolderError) as error:
        log.warning("takes no turns with other engines of the device: %s", error)
        return UnsharedDevice()


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a write beyond a full disk would be SIGBUS
        return mmap.mmap(file.fileno(), size)


def _refuse(reason: str) -> Any:
    raise OSError(reason)


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
        self._use, self._record = DeviceUse(os.getpid(), str(engine)), RecordFile(_USES)
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
        uses = [one for one in shown_records(_USES, DeviceUse) if one.engine != self._use.engine]
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
