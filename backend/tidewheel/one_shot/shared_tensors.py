"""Tensors in messages: up to 64 KiB in the message itself, more in a file of shared memory.

The receiver removes the file's name as it maps the file, so the memory ends with the last process that holds it.
Requests of one-shot models use files of their front end in turn: these keep their names while it lives. Other files
without a receiver are removed by their writer or, after its death, by its engine or the next process that starts.
"""

import contextlib
import functools
import itertools
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.errors import Busy, InternalError
from tidewheel.one_shot.signature import DTYPES, Array, Arrays, dtype_name
from tidewheel.private_dir import private_dir
from tidewheel_process.child import start_ticks

INLINE_BYTES = 64 << 10
UNREAD_S = 10.0  # a front end that is silent for 5 s counts as gone
MAX_KEPT_BYTES = 32 << 20  # of a front end, free
_MAX_MAPPED_BYTES = 128 << 20  # of all front ends, in an engine
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - in it, a folder of mode 0700
_ALIGNMENT = 64  # bytes
_RETRY_AFTER_MS = 250
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC

_numbers = itertools.count()
_start_ticks = functools.cache(start_ticks)  # for this process
_unread: deque[tuple[float, Path]] = deque()  # of results, with the time of writing


class PackedTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    dtype: str  # key of `DTYPES`
    shape: tuple[int, ...]
    num_bytes: int


class PackedTensors(msgspec.Struct, array_like=True, dict=True):
    tensors: list[PackedTensor]
    data: bytes = b""
    file: str = ""  # name in `folder`; empty: `data` holds the bytes
    is_kept: bool = False  # the file is used again

    @classmethod
    def of(cls, arrays: Arrays, *, is_result: bool = False, keeps: bool = False) -> "PackedTensors":
        """Copy arrays once, with `keeps` into a file of `kept_files`. Raise `Busy` if shared memory is full.

        The file of a result is removed by `remove_unread`, that of a request by `discard`.
        """
        parts = [_bytes_of(array) for array in arrays.values()]
        pairs = zip(arrays.items(), parts, strict=True)
        tensors = [PackedTensor(name, dtype_name(array), array.shape, part.nbytes) for (name, array), part in pairs]
        views = [piece for part in parts for piece in (part.data, bytes(-part.nbytes % _ALIGNMENT))]
        if (size := sum(map(len, views))) <= INLINE_BYTES:
            return cls(tensors, b"".join(views))
        file, end = kept_files.lend(size) if keeps else _allocate(size), 0
        for view in views:
            file.memory[end : (end := end + len(view))] = view
        if is_result:
            _unread.append((time.monotonic(), file.path))
        return cls(tensors, file=file.path.name, is_kept=keeps)

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """Map the tensors, read only. Raise `InternalError` if the file is gone or broken."""
        try:
            path = folder() / Path(self.file).name
            buffer = _map(path, is_kept=self.is_kept) if self.file else self.data
            arrays, offset = {}, 0
            for name, dtype, shape, num_bytes in map(msgspec.structs.astuple, self.tensors):
                arrays[name] = _read(buffer, offset, dtype, shape, num_bytes)
                offset += num_bytes + -num_bytes % _ALIGNMENT
        except (OSError, ValueError, KeyError) as error:
            raise InternalError(f"the tensors of a message cannot be read: {error}") from None
        return arrays

    def claim(self) -> None:
        """Map the tensors now; `arrays` reports a failure."""
        with contextlib.suppress(InternalError):
            _ = self.arrays

    def discard(self, *, is_unused: bool = False) -> None:
        """Remove the file, unless it is kept and no engine reads it any more."""
        if self.is_kept:
            kept_files.give_back(self.file, is_unused=is_unused)
        elif self.file:
            (folder() / self.file).unlink(missing_ok=True)


class SharedFile(NamedTuple):
    path: Path
    memory: mmap.mmap


class KeptFiles:
    """Files that the requests of a front end use in turn: new shared memory costs more than a copy. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, SharedFile] = {}  # by name; the last used at the end
        self._lent: dict[str, SharedFile] = {}

    def lend(self, size: int) -> SharedFile:
        """Return a file of at most twice the size. Raise `Busy`."""
        with self._lock:
            fitting = (name for name in reversed(self._free) if size <= len(self._free[name].memory) <= 2 * size)
            file = self._free.pop(name) if (name := next(fitting, "")) else _allocate(size)
            self._lent[file.path.name] = file
            return file

    def give_back(self, name: str, *, is_unused: bool) -> None:
        with self._lock:
            if (file := self._lent.pop(name, None)) is None:
                return
            if not is_unused:
                file.path.unlink(missing_ok=True)
                return
            self._free[name] = file
            while sum(len(each.memory) for each in self._free.values()) > MAX_KEPT_BYTES:
                self._free.pop(next(iter(self._free))).path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            for file in (*self._free.values(), *self._lent.values()):
                file.path.unlink(missing_ok=True)
            self._free, self._lent = {}, {}


kept_files = KeptFiles()
_mapped: dict[str, mmap.mmap] = {}  # kept files of front ends, the last used at the end


@functools.cache
def folder() -> Path:
    """Make the folder of this user and PID namespace, without files of dead processes."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    path = private_dir(_SHARED_MEMORY / f"tidewheel-{os.getuid()}-{namespace}")
    _sweep(path)
    return path


def sweep_kept() -> None:
    """Remove kept files of dead front ends, whose requests this process ran."""
    if _mapped:
        _sweep(folder())


def _sweep(path: Path) -> None:
    """Remove the files of dead processes, and unmap kept files that have no name any more."""
    for file in path.iterdir():
        pid, _, rest = file.name.partition("-")
        if not pid.isdecimal() or str(start_ticks(int(pid))) != rest.partition("-")[0]:
            file.unlink(missing_ok=True)
    for name in [name for name in _mapped if not (path / name).exists()]:
        del _mapped[name]


def remove_unread(older_than_s: float = UNREAD_S) -> None:
    """Remove the files of results that no front end received in time."""
    until = time.monotonic() - older_than_s
    while _unread and _unread[0][0] <= until:
        _unread.popleft()[1].unlink(missing_ok=True)


def _allocate(size: int) -> SharedFile:
    path = folder() / f"{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a write beyond a full /dev/shm would be SIGBUS
        return SharedFile(path, mmap.mmap(descriptor, size))
    except OSError as error:
        path.unlink(missing_ok=True)
        text = f"shared memory is full: {error.strerror}; give the server more /dev/shm"
        raise Busy(text, retry_after_ms=_RETRY_AFTER_MS) from None
    finally:
        os.close(descriptor)


def _map(path: Path, *, is_kept: bool) -> mmap.mmap:
    if (memory := _mapped.pop(path.name, None)) is None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
            if not is_kept:
                path.unlink(missing_ok=True)
    if is_kept:
        _mapped[path.name] = memory
        while sum(map(len, _mapped.values())) > _MAX_MAPPED_BYTES:
            del _mapped[next(iter(_mapped))]  # one that was given up, or is mapped again
    return memory


def _bytes_of(array: Array) -> Array:
    if dtype_name(array) != "BYTES":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    items = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
    return np.frombuffer(b"".join(len(item).to_bytes(4, "little") + item for item in items), np.uint8)


def _read(buffer: mmap.mmap | bytes, offset: int, dtype: str, shape: Sequence[int], num_bytes: int) -> Array:
    kind, count = np.dtype(DTYPES[dtype]), math.prod(shape)
    if min(shape, default=0) < 0 or offset + num_bytes > len(buffer):
        raise ValueError(f"{num_bytes} bytes are not a tensor of shape {list(shape)}")
    if dtype != "BYTES":
        if num_bytes != count * kind.itemsize:
            raise ValueError(f"{num_bytes} bytes are not {count} numbers of {dtype}")
        return np.frombuffer(buffer, kind, count, offset).reshape(shape)
    items, end = [], offset + num_bytes
    while offset < end:
        begin = offset + 4
        offset = begin + int.from_bytes(buffer[begin - 4 : begin], "little")
        items.append(buffer[begin:offset])
    array = np.empty(len(items), np.object_)
    array[:] = items
    return array.reshape(shape)
