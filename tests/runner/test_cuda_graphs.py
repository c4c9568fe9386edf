"""The order of a capture, with a CUDA that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from support.runner.recorded_graphs import NotCapturable, RecordedGraph, RecordingPool
from tidewheel.runner import accelerator
from tidewheel.runner.accelerator import CudaAccelerator, CudaGraphPool, _CudaArray
from tidewheel.runner.warm_up import estimated_graph_bytes

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """Memory falls by 30 bytes with each capture, and by 4 with each replay of a new graph."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free = 1000
        self.stream = mock.Mock()
        self.stream.wait_stream.side_effect = lambda other: self.log.append("side waits")
        self.stream.synchronize.side_effect = lambda: self.log.append("host waits")

    def graph(self) -> mock.Mock:
        graph = mock.Mock()
        graph.capture_begin.side_effect = lambda pool, capture_error_mode: self._note(f"begin {pool}", 0)
        graph.capture_end.side_effect = lambda: self._note("end", 30)
        graph.replay.side_effect = lambda: self._note("replay", 4)
        return graph

    def _note(self, line: str, num_bytes: int) -> None:
        self.log.append(line)
        self.free -= num_bytes

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        assert stream is self.stream
        self.log.append("side {")
        yield
        self.log.append("}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    handles = iter(("pool", "another pool"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "stream", fake.on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free, 2000))
    return fake


def test_a_function_runs_once_before_it_is_captured_and_the_graph_once_after(cuda: FakeCuda) -> None:
    pool = CudaGraphPool(DEVICE, cuda.stream)
    output = torch.ones(1)

    def function() -> torch.Tensor:
        cuda.log.append("function")
        cuda.free -= 7 * (cuda.log.count("function") == 1)  # what a first run allocates is not the graph's
        return output

    captured = pool.capture(function)
    side = ["side waits", "side {"]
    assert cuda.log == [
        *side, "function", "}", "host waits",
        "side {", "begin pool", "function", "end", "}",
        *side, "replay", "}", "host waits",
    ]  # fmt: skip
    assert captured.output is output
    assert pool.num_bytes == 34
    pool.capture(function)
    assert pool.num_bytes == 68


def test_a_capture_that_fails_is_ended_and_tells_why(cuda: FakeCuda) -> None:
    def function() -> torch.Tensor:
        if "begin pool" in cuda.log:
            raise torch.OutOfMemoryError("no room")
        return torch.ones(1)

    ended = RuntimeError("operation failed due to a previous error during capture")
    graph = cuda.graph()
    graph.capture_end.side_effect = ended
    with mock.patch.object(torch.cuda, "CUDAGraph", lambda: graph), pytest.raises(torch.OutOfMemoryError):
        CudaGraphPool(DEVICE, cuda.stream).capture(function)
    graph.capture_end.assert_called_once()


@pytest.fixture
def recording(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingPool]:
    """Capture by recording, with the allocators of torch before 2.13."""
    recording = RecordingPool()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(recording))
    with recording.allocator.installed():
        yield recording


def test_after_a_capture_that_cuda_refuses_others_succeed(cuda: FakeCuda, recording: RecordingPool) -> None:
    pool, allocator, x = CudaGraphPool(DEVICE, cuda.stream), recording.allocator, torch.ones(2)
    before = pool.capture(lambda: x + 1)
    with pytest.raises(NotCapturable, match="item waits for the device"):
        pool.capture(lambda: x * x.sum().item())
    allocator.empty_cache()
    assert allocator.released == ["pool"]
    allocator.generator.graphsafe_set_state.assert_called_once_with(allocator.generator.clone_state())
    assert pool.capture(lambda: x + 2).output.tolist() == [3.0, 3.0]
    before.graph.replay()
    assert before.output.tolist() == [2.0, 2.0]


def test_an_error_in_a_capture_that_cuda_takes_closes_nothing_twice(cuda: FakeCuda, recording: RecordingPool) -> None:
    calls = iter((torch.ones(1),))
    with pytest.raises(StopIteration):
        CudaGraphPool(DEVICE, cuda.stream).capture(lambda: next(calls))
    recording.allocator.empty_cache()
    assert recording.allocator.released == []


def test_a_graph_that_does_not_load_closes_nothing_twice(
    cuda: FakeCuda, recording: RecordingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = RecordedGraph.capture_end

    def refuse(self: RecordedGraph) -> None:
        end(self)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(RecordedGraph, "capture_end", refuse)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        CudaGraphPool(DEVICE, cuda.stream).capture(lambda: torch.ones(1))
    recording.allocator.empty_cache()
    assert recording.allocator.released == []


def test_torch_since_2_13_closes_captures_itself(
    cuda: FakeCuda, recording: RecordingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "LEAVES_CAPTURES_OPEN", False)
    with pytest.raises(NotCapturable):
        CudaGraphPool(DEVICE, cuda.stream).capture(lambda: torch.ones(1).sum().item())
    assert recording.allocator.released == []


@pytest.mark.parametrize("mode", [0, 1])
def test_torch_refuses_to_wait_until_the_end_even_after_an_error(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [mode]
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(ValueError, match="inside"), CudaAccelerator(DEVICE).no_waiting():
        assert modes[-1] == "error"
        raise ValueError("inside")
    assert modes == [mode, "error", mode]


def test_memory_is_named_by_address_and_strides_in_bytes() -> None:
    tensor = torch.empty(6, 4, dtype=torch.bfloat16)[::2, 1:3]
    assert _CudaArray(tensor).__cuda_array_interface__ == {
        "shape": (3, 2), "typestr": "<i2", "data": (tensor.data_ptr(), False), "strides": (16, 2), "version": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("taken", "num_sizes", "expected"), [([], 0, 0), ([50], 1, 50), ([50, 8], 2, 58), ([50, 0, 8], 35, 50 + 34 * 8)]
)
def test_memory_of_all_graphs_follows_from_that_of_the_largest(
    taken: list[int], num_sizes: int, expected: int
) -> None:
    assert estimated_graph_bytes(taken, num_sizes) == expected
