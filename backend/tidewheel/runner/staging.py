"""Small host arrays on their way to the device: one copy a step, from pinned memory, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

HostArray = npt.NDArray[np.generic]

ALIGNMENT = 16  # bytes; every view starts at a multiple of it
NUM_SLOTS = 3  # pinned buffers: a slot is written again only after its copy is done


class _Slot:
    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reserve(self, size: int) -> torch.Tensor:
        self.copied.synchronize()
        if self.buffer.numel() < size:
            self.buffer = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self.buffer[:size]


class Staging:
    """Turns host arrays into device tensors. On a CPU they share memory; arrays must not be written afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot() for _ in range(NUM_SLOTS)] if device.type == "cuda" else []
        self._next = 0

    def to_device(self, groups: Sequence[Sequence[HostArray] | None]) -> list[list[torch.Tensor]]:
        """The tensors of each group, in order; none for a group that is None."""
        arrays = [array for group in groups for array in group or ()]
        tensors = iter(self._copied(arrays) if self._slots else [torch.from_numpy(array) for array in arrays])
        return [[next(tensors) for _ in group or ()] for group in groups]

    def _copied(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        packed = slot.reserve(ends[-1])
        host = packed.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = packed.to(self._device, non_blocking=True)
        slot.copied.record()
        return [_view(on_device, start, array) for start, array in zip(starts, arrays, strict=True)]


def _view(packed: torch.Tensor, start: int, array: HostArray) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return packed[start : start + array.nbytes].view(dtype).view(array.shape)
