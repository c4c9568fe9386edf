"""Asynchronous device: pinned memory, events and CUDA graphs.

Graphs freeze host values, control flow, and addresses of inputs and outputs; captured functions draw nothing random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")  # one or more tensors

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


class DeviceGraph(Protocol):
    def replay(self) -> None: ...


class CapturedGraph(NamedTuple, Generic[T]):
    graph: DeviceGraph
    output: T  # in pool memory; the last replay's result


class GraphPool(Protocol):
    """Graphs whose replays may overwrite each other's results, except tensors held at their capture."""

    num_bytes: int  # device memory of all captures

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Run `function` at least once, then capture it in the same inference mode."""

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias that does not keep the memory from later captures."""


class CudaGraphPool:
    """Captures on a side stream, whose cuBLAS workspace belongs to the graphs."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream
        self.num_bytes = 0

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Run `function` to compile and allocate, capture it, and replay it to load the graph."""
        self._run_on_stream(function)
        free_before, _ = torch.cuda.mem_get_info(self._device)
        captured = self._capture(function)
        self._run_on_stream(captured.graph.replay)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self.num_bytes += max(free_before - free_after, 0)  # another program may have freed memory
        return captured

    def _run_on_stream(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()

    def _capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                return CapturedGraph(graph, capture_into(graph, function, self._pool))
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # for pinned memory torch may keep the old one open
            raise

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Alias through the CUDA array interface, which has no bfloat16."""
        integers = torch.as_tensor(_CudaArray(tensor), device=tensor.device)
        return integers.view(tensor.dtype)


class _CudaArray:
    """Version 3 of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(tensor.itemsize * stride for stride in tensor.stride()),
            "version": 3,
        }


class DeviceEvent(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait for work queued before `record`; return at once without one."""


class Accelerator(Protocol):
    """Device operations beside torch's. Tests have one without a GPU."""

    @property
    def device(self) -> torch.device: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory whose copies do not block."""

    def event(self) -> DeviceEvent: ...

    def graph_pool(self) -> GraphPool: ...

    def no_waiting(self) -> AbstractContextManager[None]:
        """Let operations raise that wait for the device."""


class CudaAccelerator:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def graph_pool(self) -> GraphPool:
        return CudaGraphPool(self.device, self._capture_stream)

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Let torch raise: for values, and for copies of pageable memory, but not in every operation."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return None for a CPU."""
    return CudaAccelerator(device) if device.type == "cuda" else None
