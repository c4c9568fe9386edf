"""An accelerator without a GPU: operations on a CPU, recorded and replayed with the semantics of a CUDA graph.

A capture runs the function once and writes down every aten operation with its arguments. A replay runs the very same
operations again and writes their results where they lay before: host values and control flow are those of the
capture, inputs are read where they were. What would wait for the device, or read it, during a capture raises.
The memory of a pool is shared, as on a GPU: a replay spoils whatever other graphs of it computed.
A capture that fails stays open in the allocator, as in torch before 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tidewheel.runner import accelerator
from tidewheel.runner.accelerator import CapturedGraph

T = TypeVar("T")

# Results whose size or presence depends on values, and reads of values.
READING_OPERATIONS = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere",
    "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::record_stream",
}  # fmt: skip
# Calls from Python that end in a read, or bring values from the host.
READING_CALLS = {
    "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "tensor", "as_tensor", "from_numpy", "__iter__", "nonzero",
}  # fmt: skip


class NotCapturable(AssertionError):
    """Error: a CUDA graph could not hold this operation."""


class Watch(TorchFunctionMode):
    """Make calls raise that read values of tensors, make tensors of host values, or run native kernels."""

    has_raised = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READING_CALLS:
            self.has_raised = True
            raise NotCapturable(f"{name} waits for the device, or brings it values of the host")
        if name == "data_ptr":
            self.has_raised = True
            raise NotCapturable("a kernel outside torch got an address: a replay would not run it")
        return function(*args, **(kwargs or {}))


class _Record(TorchDispatchMode):
    has_raised = False

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode, composed operations arrive whole
            parts = function.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = function._schema.name
        if name in READING_OPERATIONS or (name == "aten::index" and _has_mask(args[1])):
            self.has_raised = True
            raise NotCapturable(f"{name} during a capture")
        result = function(*args, **(kwargs or {}))
        self.operations.append(_Operation(function, args, kwargs or {}, result))
        return result


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


class _Operation:
    def __init__(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.read = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self.made = [tensor for tensor in _tensors(result) if _storage(tensor) not in self.read]

    def replay(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        fresh = [tensor for tensor in _tensors(result) if _storage(tensor) not in self.read]
        for made, again in zip(self.made, fresh, strict=True):
            made.copy_(again)


class RecordedAllocator:
    """The allocators of device and pinned memory in torch before 2.13: which pools captures are open in."""

    def __init__(self) -> None:
        self.of_device: list[object] = []
        self.of_host: list[object] = []
        self.released: list[object] = []
        self.generator = mock.Mock()  # of the device

    def begin(self, pool: object) -> None:
        for opened in (self.of_device, self.of_host):
            if pool in opened:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            opened.append(pool)

    def end_on_device(self, device: int, pool: object) -> None:
        if pool not in self.of_device:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.of_device.remove(pool)

    def end(self, pool: object) -> None:
        self.end_on_device(0, pool)
        self.of_host.remove(pool)

    def empty_cache(self) -> None:
        if self.of_device:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Offer it where torch offers its own, and take this torch for one before 2.13."""
        with ExitStack() as stack:
            for owner, name, value in (
                (accelerator, "LEAVES_CAPTURES_OPEN", True),
                (torch._C, "_cuda_endAllocateToPool", self.end_on_device),
                (torch._C, "_cuda_releasePool", lambda device, pool: self.released.append(pool)),
                (torch.cuda, "current_device", lambda: 0),
                (torch.cuda, "default_generators", [self.generator]),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


class RecordedGraph:
    def __init__(self, pool: RecordingPool) -> None:
        self._pool = pool
        self._modes = ExitStack()
        self._watch, self._record = Watch(), _Record()
        self.made: list[torch.Tensor] = []
        self.num_replays = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._pool.allocator.begin(pool)
        self._handle = pool
        self._modes.enter_context(self._watch)
        self._modes.enter_context(self._record)

    def capture_end(self) -> None:
        self._modes.close()
        if self._watch.has_raised or self._record.has_raised:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._pool.allocator.end(self._handle)
        self.made = [tensor for operation in self._record.operations for tensor in operation.made]
        self.storages = {_storage(tensor) for tensor in self.made}
        self.read = {storage for operation in self._record.operations for storage in operation.read}

    def replay(self) -> None:
        self._pool.spoil_others(self)
        for operation in self._record.operations:
            operation.replay()
        self.num_replays += 1


class RecordingPool:
    def __init__(self, allocator: RecordedAllocator | None = None) -> None:
        self.allocator = allocator or RecordedAllocator()
        self._handle = object()
        self.graphs: list[RecordedGraph] = []
        self._holding: list[RecordedGraph] = []  # that nobody has spoiled since they ran
        self.num_bytes = 0

    def capture(self, function: Callable[[], T]) -> CapturedGraph[T]:
        function()  # the warm-up
        graph = RecordedGraph(self)
        with self.allocator.installed():
            output = accelerator.capture_into(graph, function, self._handle)
        self.graphs.append(graph)
        self.num_bytes += sum(tensor.nbytes for tensor in graph.made)
        graph.replay()
        return CapturedGraph(graph, output)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def spoil_others(self, running: RecordedGraph) -> None:
        """Overwrite what other graphs made, except what `running` reads, which was held while it was captured."""
        kept = [graph for graph in self._holding if graph is running or graph.storages & running.read]
        for graph in self._holding:
            for tensor in graph.made if graph is not running else ():
                if _storage(tensor) not in running.read:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else -77 if tensor.dtype.is_signed else 1)
        self._holding = [*(graph for graph in kept if graph is not running), running]


class RecordedEvent:
    """An event; `log` gets what happens to all events of an accelerator, in order."""

    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self._log, self._number = log, number

    def record(self) -> None:
        self._log.append(("record", self._number))

    def synchronize(self) -> None:
        self._log.append(("synchronize", self._number))


class RecordingAccelerator:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.pools: list[RecordingPool] = []
        self.allocator = RecordedAllocator()
        self._num_events = 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 77, dtype=dtype)

    def event(self) -> RecordedEvent:
        self._num_events += 1
        return RecordedEvent(self.events, self._num_events - 1)

    def graph_pool(self) -> RecordingPool:
        self.pools.append(RecordingPool(self.allocator))
        return self.pools[-1]

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        with Watch(), _Record():
            yield
