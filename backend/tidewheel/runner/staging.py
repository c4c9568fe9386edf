from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.runner.accelerator import Accelerator

HostArray = npt.NDArray[np.generic]
Group = Sequence[HostArray]
GroupName = Literal[
    "inputs", "draw", "allowed", "bias", "words", "penalties", "logprob_rows", "mask_rows",
    "prompt", "pooling", "changes",
]  # fmt: skip
Groups = Mapping[GroupName, Group | None]
TypedViews = dict[np.dtype[Any], torch.Tensor]

ALIGNMENT = 16  # bytes
NUM_SLOTS = 3
DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class DeviceArrays(Protocol):
    def group(self, name: GroupName) -> list[torch.Tensor]:
        """Return tensors valid until the next `send`; empty for a None group."""


class InputSender(Protocol):
    def send(self, groups: Groups) -> DeviceArrays:
        """Send one-dimensional arrays, which must not be written afterwards."""


class SharedMemorySender:
    """CPU sender whose tensors share the arrays' memory."""

    def send(self, groups: Groups) -> DeviceArrays:
        return _SharedArrays(groups)


class _SharedArrays:
    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def group(self, name: GroupName) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in self._groups[name] or ()]


class StagingSender:
    """Sender through a pinned buffer into a fixed device buffer: one asynchronous copy, after all reads of old
    content.

    Leading arrays keep their addresses while their sizes stay, as graphs require; from the first that does not fit,
    all go into a new tensor.
    """

    def __init__(self, accelerator: Accelerator, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._num_bytes = num_bytes
        self._static = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._views: TypedViews = {dtype: self._static.view(torch_dtype) for dtype, torch_dtype in DTYPES.items()}
        self._slots = [_PinnedBuffer(accelerator, num_bytes) for _ in range(NUM_SLOTS)]
        self._next = 0

    def send(self, groups: Groups) -> DeviceArrays:
        arrays = [array for group in groups.values() for array in group or ()]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        host = slot.filled(arrays, starts, end)
        num_static = _num_inside(arrays, starts, self._num_bytes)
        split = starts[num_static] if num_static < len(arrays) else end
        self._static[:split].copy_(host[:split], non_blocking=True)
        rest = self._static[:0]
        if split < end:
            rest = torch.empty(end - split, dtype=torch.uint8, device=self._static.device)
            rest.copy_(host[split:end], non_blocking=True)
        slot.copied.record()
        return _PackedArrays(groups, arrays, starts, split, self._views, rest)


def _num_inside(arrays: Sequence[HostArray], starts: Sequence[int], num_bytes: int) -> int:
    if not arrays or starts[-1] + arrays[-1].nbytes <= num_bytes:
        return len(arrays)
    return next(i for i, array in enumerate(arrays) if starts[i] + array.nbytes > num_bytes)


class _PinnedBuffer:
    def __init__(self, accelerator: Accelerator, num_bytes: int) -> None:
        self._accelerator = accelerator
        self.copied = accelerator.event()
        self._make(num_bytes)

    def _make(self, num_bytes: int) -> None:
        self._buffer = self._accelerator.pinned((num_bytes,), torch.uint8)
        self._bytes = self._buffer.numpy()

    def filled(self, arrays: Sequence[HostArray], starts: Sequence[int], num_bytes: int) -> torch.Tensor:
        self.copied.synchronize()
        if self._buffer.numel() < num_bytes:
            self._make(2 * num_bytes)
        for start, array in zip(starts, arrays, strict=True):
            self._bytes[start : start + array.nbytes].view(array.dtype)[:] = array
        return self._buffer


class _PackedArrays:
    def __init__(
        self,
        groups: Groups,
        arrays: Sequence[HostArray],
        starts: Sequence[int],
        split: int,
        static: TypedViews,
        rest: torch.Tensor,
    ) -> None:
        self._groups = groups
        self._arrays = arrays
        self._starts = starts
        self._split = split
        self._static = static
        self._rest = rest

    def group(self, name: GroupName) -> list[torch.Tensor]:
        names = list(self._groups)
        first = sum(len(self._groups[earlier] or ()) for earlier in names[: names.index(name)])
        return [self._view(first + i) for i in range(len(self._groups[name] or ()))]

    def _view(self, index: int) -> torch.Tensor:
        array, start = self._arrays[index], self._starts[index]
        if start >= self._split and array.size:
            start -= self._split
            return self._rest[start : start + array.nbytes].view(DTYPES[array.dtype])
        first = start // array.itemsize
        return self._static[array.dtype][first : first + array.size]
