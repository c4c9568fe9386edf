"""CUDA graphs: what a function queues on the device, recorded once and queued again in one call.

A graph repeats kernels with the very arguments of the capture. So host values and control flow are frozen, inputs are
the tensors that the function read, and outputs lie where they lay. The functions captured here draw no random
numbers, so no generator has to be registered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch


class Graph(Protocol):
    def replay(self) -> None: ...


class Captured(NamedTuple):
    graph: Graph
    output: torch.Tensor  # in the memory of the pool; holds the result of the last replay


class GraphPool(Protocol):
    """Graphs that share their working memory: a replay may overwrite what every other graph of the pool computed,
    except what was still held when it was captured."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the captures took."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        """Runs `function` at least once for real; it must bear that, and be captured in the same inference mode."""

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory. Once nobody else holds `tensor`, graphs captured later may use it too."""


class CudaGraphPool:
    """Captures on a stream that is not the default one; cuBLAS keeps a workspace for it, which the graphs use."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        """Runs it first without capturing: kernels are compiled and loaded, and workspaces allocated, outside of the
        graph. The first replay, here too, loads the graph onto the device."""
        self._run_on_stream(function)
        free_before, _ = torch.cuda.mem_get_info(self._device)
        captured = self._capture(function)
        self._run_on_stream(captured.graph.replay)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self._num_bytes += max(free_before - free_after, 0)  # another program may have given memory back
        return captured

    def _run_on_stream(self, function: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()

    def _capture(self, function: Callable[[], torch.Tensor]) -> Captured:
        """torch.cuda.graph would also collect garbage and empty the cache, each time: half a second for all graphs
        becomes a minute. Other threads may use the device meanwhile, hence `thread_local`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with suppress(RuntimeError):  # it would only say that what went wrong has ended the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        return Captured(graph, output)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through the CUDA array interface, which names memory by its address; it knows no bfloat16."""
        integers = torch.as_tensor(_Address(tensor), device=tensor.device)
        return integers.view(tensor.dtype)


class _Address:
    """Version 3 of https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(tensor.itemsize * stride for stride in tensor.stride()),
            "version": 3,
        }
