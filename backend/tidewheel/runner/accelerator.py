"""A device that works through what it was given while the host goes on: what crosses over to it, and its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tidewheel.runner.cuda_graphs import CudaGraphPool, GraphPool


class Event(Protocol):
    """A point in the order of the device's work."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Waits, on the host, for all that was queued before `record`; not at all where that was never called."""


class Accelerator(Protocol):
    """What the runner needs of such a device beside torch's operations. Tests have one without a GPU."""

    @property
    def device(self) -> torch.device: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that copies to and from the device do not wait for."""

    def event(self) -> Event: ...

    def graph_pool(self) -> GraphPool: ...


class Cuda:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def graph_pool(self) -> GraphPool:
        return CudaGraphPool(self.device, self._capture_stream)


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None for a CPU: what it computes is there when the call returns."""
    return Cuda(device) if device.type == "cuda" else None
