"""Tensors in messages: up to 64 KiB in the message itself, more in a file of shared memory.

The receiver removes the file's name as it maps the file, so the memory ends with the last process that holds it.
Files without a receiver are removed by their writer or, after its death, by the next process that starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tidewheel.errors import Busy, InternalError
from tidewheel.one_shot.signature import DTYPES, Array, Arrays, dtype_name
from tidewheel.private_dir import private_dir
from tidewheel_process.handle import start_ticks

INLINE_BYTES = 64 << 10
UNREAD_S = 10.0  # a front end that is silent for 5 s counts as gone
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - in it, a folder of mode 0700
_ALIGNMENT = 64  # bytes
_RETRY_AFTER_MS = 250
_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC

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

    @classmethod
    def of(cls, arrays: Arrays, *, is_result: bool = False) -> PackedTensors:
        """Copy arrays once. Raise `Busy` if shared memory is full.

        The file of a result is removed by `remove_unread`, that of a request by `discard`.
        """
        parts = [_bytes_of(array) for array in arrays.values()]
        pairs = zip(arrays.items(), parts, strict=True)
        tensors = [PackedTensor(name, dtype_name(array), array.shape, part.nbytes) for (name, array), part in pairs]
        views = [piece for part in parts for piece in (part.data, bytes(-part.nbytes % _ALIGNMENT))]
        if sum(part.nbytes for part in parts) <= INLINE_BYTES:
            return cls(tensors, b"".join(views))
        path = folder() / f"{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        _write(path, views)
        if is_result:
            _unread.append((time.monotonic(), path))
        return cls(tensors, file=path.name)

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """Map the tensors, read only, and remove the file's name. Raise `InternalError` if it is gone or broken."""
        try:
            buffer = _map(folder() / Path(self.file).name) if self.file else self.data
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

    def discard(self) -> None:
        if self.file:
            (folder() / self.file).unlink(missing_ok=True)


@functools.cache
def folder() -> Path:
    """Make the folder of this user and PID namespace, without files of dead processes."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    path = private_dir(_SHARED_MEMORY / f"tidewheel-{os.getuid()}-{namespace}")
    for file in path.iterdir():
        pid, _, rest = file.name.partition("-")
        if not pid.isdecimal() or str(start_ticks(int(pid))) != rest.partition("-")[0]:
            file.unlink(missing_ok=True)
    return path


def remove_unread(older_than_s: float = UNREAD_S) -> None:
    """Remove the files of results that no front end received in time."""
    until = time.monotonic() - older_than_s
    while _unread and _unread[0][0] <= until:
        _unread.popleft()[1].unlink(missing_ok=True)


def _write(path: Path, views: Sequence[memoryview | bytes]) -> None:
    size = sum(len(view) for view in views)
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
        try:
            num_written = os.writev(descriptor, views)
        finally:
            os.close(descriptor)
        if num_written == size:
            return
        reason = f"{num_written} of {size} bytes were written"
    except OSError as error:
        reason = error.strerror or str(error)
    path.unlink(missing_ok=True)
    raise Busy(f"shared memory is full: {reason}; give the server more /dev/shm", retry_after_ms=_RETRY_AFTER_MS)


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


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
