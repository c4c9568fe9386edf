"""Asynchronous device: pinned memory, events and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tidewheel.runner.cuda_graphs import CudaGraphPool, GraphPool


class Event(Protocol):
    """Point in the device's queue."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait for work queued before `record`; return at once without one."""


class Accelerator(Protocol):
    """Device operations beside torch's. Tests have one without a GPU."""

    @property
    def device(self) -> torch.device: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory for copies that do not block."""

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
    """Return None for a CPU, whose calls return finished results."""
    return Cuda(device) if device.type == "cuda" else None
