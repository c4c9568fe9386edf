"""The capture of a CUDA graph; if it fails, torch goes on as if nothing had been captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")

LEAVES_CAPTURES_OPEN = torch.__version__ < "2.13"


def capture_into(graph: torch.cuda.CUDAGraph, function: Callable[[], T], pool: torch.cuda._POOL_HANDLE) -> T:
    """Capture the function on the current stream. No other capture may go into the pool of one that failed.

    `torch.cuda.graph` would collect garbage too, which takes a minute for all graphs instead of half a second, and
    would leave its stream the current one after a failure.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # others may use the device
    try:
        output = function()
    except BaseException:
        with suppress(RuntimeError):  # it only repeats that the error ended the capture
            _end(graph, pool)
        raise
    _end(graph, pool)
    return output


def _end(graph: torch.cuda.CUDAGraph, pool: torch.cuda._POOL_HANDLE) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        if LEAVES_CAPTURES_OPEN:
            _close(pool)
        raise


def _close(pool: torch.cuda._POOL_HANDLE) -> None:
    """Close what torch before 2.13 leaves open if CUDA refuses a capture: https://github.com/pytorch/pytorch/pull/180395.

    Else the device's allocator keeps the pool and cannot empty its cache, and its generator can draw nothing.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # it is closed: CUDA took the capture, and refused its graph
        return
    torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # a clone is not capturing
