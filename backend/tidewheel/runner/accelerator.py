"""Asynchronous device: pinned memory, events and CUDA graphs.

A graph freezes host values, control flow and addresses of tensors; a captured function draws nothing random.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")

LEAVES_CAPTURES_OPEN = torch.__version__ < "2.13"


def capture_into(graph: torch.cuda.CUDAGraph, function: Callable[[], T], pool: torch.cuda._POOL_HANDLE) -> T:
    """Capture a CUDA graph on the current stream. A failed capture's pool must not be used again.

    `torch.cuda.graph` would collect garbage, which is slow, and leave its stream current after a failure.
    """
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # others may use the device
    try:
        output = function()
    except BaseException:
        with suppress(RuntimeError):  # repeats an error of `function`
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
    """Close a capture that torch before 2.13 leaves open if CUDA refuses it (pytorch/pytorch#180395)."""
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # closed already
        return
    torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # a clone is not capturing


class CapturedGraph(NamedTuple, Generic[T]):
    graph: torch.cuda.CUDAGraph
    output: T  # in pool memory, overwritten by each replay


class CudaGraphPool:
    """Memory pool of CUDA graphs, captured on a side stream whose cuBLAS workspace belongs to the graphs.

    A replay may overwrite other graphs' results, except tensors alive at the capture of the replayed graph.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream
        self.num_bytes = 0  # device memory

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        """Run a function to compile its kernels, capture it, and replay the graph to load it."""
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
            self._pool = torch.cuda.graph_pool_handle()  # torch may keep the old pool open
            raise

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias whose memory later captures may overwrite."""
        # The CUDA array interface has no bfloat16.
        integers = torch.as_tensor(_CudaArray(tensor), device=tensor.device)
        return integers.view(tensor.dtype)


class _CudaArray:
    """CUDA array interface, version 3 (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(tensor.itemsize * stride for stride in tensor.stride()),
            "version": 3,
        }


class CudaAccelerator:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def graph_pool(self) -> CudaGraphPool:
        return CudaGraphPool(self.device, self._capture_stream)

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Make torch raise on reads of device values and copies of pageable memory. It misses other waits."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def accelerator_of(device: torch.device) -> CudaAccelerator | None:
    return CudaAccelerator(device) if device.type == "cuda" else None
