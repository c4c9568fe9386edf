from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.runner.accelerator import CudaAccelerator

HostArray = npt.NDArray[np.generic]
Group = Sequence[HostArray]
GroupName = Literal[
    "inputs", "draw", "allowed", "bias", "words", "penalties", "logprob_rows", "mask_rows",
    "prompt", "pooling", "changes",
]  # fmt: skip
Groups = Mapping[GroupName, Group | None]
DeviceArrays = Mapping[GroupName, list[torch.Tensor]]  # valid until the next send; empty for a None group
InputSender = Callable[[Groups], DeviceArrays]  # of one-dimensional arrays, which must not be written afterwards
TypedViews = dict[np.dtype[Any], torch.Tensor]
Placement = tuple[int, HostArray]  # first byte

ALIGNMENT = 16  # bytes
NUM_SLOTS = 3
DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def share_memory(groups: Groups) -> DeviceArrays:
    return {name: [torch.from_numpy(array) for array in group or ()] for name, group in groups.items()}


class StagingSender:
    """Copier of step inputs to fixed device memory, asynchronously and after the device has read the old inputs.

    As graphs require, an array keeps its address while the sizes of earlier arrays stay. The first array that does
    not fit, and all after it, go into a new tensor.
    """

    def __init__(self, accelerator: CudaAccelerator, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._num_bytes = num_bytes
        self._static = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._views: TypedViews = {dtype: self._static.view(torch_dtype) for dtype, torch_dtype in DTYPES.items()}
        self._slots = [_PinnedBuffer(accelerator, num_bytes) for _ in range(NUM_SLOTS)]
        self._next = 0

    def __call__(self, groups: Groups) -> DeviceArrays:
        placed: dict[GroupName, list[Placement]] = {}
        end = 0
        for name, group in groups.items():
            placed[name] = []
            for array in group or ():
                placed[name].append((end, array))
                end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        places = [place for of_group in placed.values() for place in of_group]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        host = slot.filled(places, end)
        split = end
        if end > self._num_bytes:
            split = next(start for start, array in places if start + array.nbytes > self._num_bytes)
        self._static[:split].copy_(host[:split], non_blocking=True)
        rest = self._static[:0]
        if split < end:
            rest = torch.empty(end - split, dtype=torch.uint8, device=self._static.device)
            rest.copy_(host[split:end], non_blocking=True)
        slot.copied.record()
        return _PackedArrays(placed, split, self._views, rest)


class _PinnedBuffer:
    def __init__(self, accelerator: CudaAccelerator, num_bytes: int) -> None:
        self._accelerator = accelerator
        self.copied = accelerator.event()
        self._make(num_bytes)

    def _make(self, num_bytes: int) -> None:
        self._buffer = self._accelerator.pinned((num_bytes,), torch.uint8)
        self._bytes = self._buffer.numpy()

    def filled(self, places: Sequence[Placement], num_bytes: int) -> torch.Tensor:
        self.copied.synchronize()
        if self._buffer.numel() < num_bytes:
            self._make(2 * num_bytes)
        for start, array in places:
            self._bytes[start : start + array.nbytes].view(array.dtype)[:] = array
        return self._buffer


class _PackedArrays(dict[GroupName, list[torch.Tensor]]):
    def __init__(
        self, placed: dict[GroupName, list[Placement]], split: int, static: TypedViews, rest: torch.Tensor
    ) -> None:
        super().__init__()
        self._placed = placed
        self._split = split
        self._static = static
        self._rest = rest

    def __missing__(self, name: GroupName) -> list[torch.Tensor]:
        self[name] = views = [self._view(*place) for place in self._placed[name]]
        return views

    def _view(self, start: int, array: HostArray) -> torch.Tensor:
        if start >= self._split and array.size:
            start -= self._split
            return self._rest[start : start + array.nbytes].view(DTYPES[array.dtype])
        first = start // array.itemsize
        return self._static[array.dtype][first : first + array.size]
