"""The stand-ins of the graph tests do what they stand in for."""

from __future__ import annotations

import pytest
import torch

from support.runner import capturable
from support.runner.recorded_graphs import NotCapturable, RecordingPool
from tidewheel.runner import accelerator
from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.packed_linear import PackedWeights, packed_linear
from tidewheel_kernels.rope.reference import rope_and_cache_reference

BLOCK_SIZE, NUM_BLOCKS = 16, 12


def test_a_replay_computes_with_what_lies_in_the_inputs_now() -> None:
    x, total = torch.zeros(3), torch.zeros(3)

    def step() -> torch.Tensor:
        total.add_(x)
        return torch.cat((x, total.unsqueeze(0)[0])) * 2

    captured = RecordingPool().capture(step)
    total.zero_()
    for value in (1.0, 5.0):
        x.fill_(value)
        captured.graph.replay()
    assert captured.output.tolist() == [10.0] * 3 + [12.0] * 3


def test_values_of_the_host_stay_those_of_the_capture() -> None:
    x, host = torch.ones(1), [2.0]
    captured = RecordingPool().capture(lambda: x * host[0])
    host[0] = 3.0
    captured.graph.replay()
    assert captured.output.tolist() == [2.0]


def test_a_replay_spoils_what_other_graphs_made_but_not_what_it_reads() -> None:
    pool, x = RecordingPool(), torch.ones(2)
    first = pool.capture(lambda: x + 1)
    second = pool.capture(lambda: first.output * 10)
    other = pool.capture(lambda: x - 1)
    first.graph.replay()
    second.graph.replay()
    assert second.output.tolist() == [20.0, 20.0]
    assert other.output.isnan().all()
    other.graph.replay()
    assert first.output.isnan().all()


def test_what_is_made_of_composed_operations_is_looked_into() -> None:
    with torch.inference_mode(), pytest.raises(NotCapturable, match="aten::index"):
        RecordingPool().capture(lambda: torch.arange(3)[torch.arange(3) > 1])


def test_a_native_kernel_is_refused_as_a_replay_would_not_run_it() -> None:
    weights, x = PackedWeights(torch.randn(64, 32)), torch.randn(2, 32)
    if weights.address is None:
        pytest.skip("oneDNN's layout is not known here, so no native kernel multiplies")
    with torch.inference_mode(), pytest.raises(NotCapturable, match="a kernel outside torch got an address"):
        RecordingPool().capture(lambda: packed_linear(x, weights))


def test_a_capture_that_stays_open_spoils_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch before 2.13: the cache cannot be emptied, and the pool takes no other capture."""
    pool = RecordingPool()
    monkeypatch.setattr(accelerator, "_close", lambda pool: None)
    with pytest.raises(NotCapturable, match="tolist"):
        pool.capture(lambda: torch.ones(2).tolist())
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT FAILED"):
        pool.allocator.empty_cache()
    with pytest.raises(RuntimeError, match="already recording"):
        pool.capture(lambda: torch.ones(2))


def metadata(seq_lens: list[int], max_seq_len: int) -> AttentionMetadata:
    count, max_blocks = len(seq_lens), -(-max_seq_len // BLOCK_SIZE)
    tables = torch.randint(NUM_BLOCKS, (count, max_blocks), dtype=torch.int32)
    return AttentionMetadata(
        slot_mapping=torch.full((count,), -1), block_tables=tables,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32), seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_seqlen_q=1, max_seq_len=max_seq_len, num_decodes=count,
    )  # fmt: skip


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(0, 0.0), (7, 0.0), (0, 3.0)])
def test_decode_attention_equals_the_reference(sliding_window: int, soft_cap: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 6, 8)
    caches = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 8)
    meta = metadata([1, 33, 0, 16, 64], 64)
    expected, actual = torch.empty_like(q), torch.empty_like(q)
    arguments = {"scale": 0.3, "sliding_window": sliding_window, "soft_cap": soft_cap, "scales": None}
    paged_attention_reference(q, caches[0], caches[1], meta, expected, **arguments)
    capturable.paged_attention(q, caches[0], caches[1], meta, actual, **arguments)
    torch.testing.assert_close(actual, expected)
    assert not actual[2].any()


def test_decode_attention_reads_no_key_that_is_not_there() -> None:
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 1, 8), float("nan"))
    caches[:, 3, :5] = 1.0
    meta = metadata([5, 0], 64)
    meta.block_tables[0, 0] = 3
    out = torch.empty(2, 2, 8)
    capturable.paged_attention(torch.ones(2, 2, 8), caches[0], caches[1], meta, out, 1.0, 0, 0.0, None)
    torch.testing.assert_close(out, torch.tensor([1.0, 0.0])[:, None, None].expand(2, 2, 8))
    assert not out[1].any()


@pytest.mark.parametrize("slots", [[5, 70, -1, -1], [9, 0, 3, 2], [-1, -1, -1, -1]])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache_equals_the_reference(slots: list[int], has_norm: bool) -> None:
    torch.manual_seed(0)
    weights = (torch.rand(8), torch.rand(8)) if has_norm else (None, None)
    q, k, v = torch.randn(4, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    caches = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 2, 8)
    shared = (torch.randn(32, 8), torch.tensor([3, 31, 0, 9]), torch.tensor(slots))
    results = []
    for function in (rope_and_cache_reference, capturable.rope_and_cache):
        tensors = [tensor.clone() for tensor in (q, k, v, caches[0], caches[1])]
        function(*tensors[:3], *shared, *tensors[3:], *weights, 1e-6, None)
        results.append(tensors)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
