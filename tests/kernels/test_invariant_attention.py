"""A query gets bitwise the same result as a decode, in any chunk of its prompt, and beside any other sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from support.kernels.kernel_harness import RATIO, PagedBatch, assert_close, paged_batch, quantised
from tidewheel_kernels import AttentionMetadata, paged_attention
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.attention.triton_kernels import invariant_attention
from tidewheel_kernels.attention.triton_kernels import paged_attention as split_attention
from tidewheel_kernels.launch_config import compile_target

SCALE = 0.2
LENGTHS = (75, 33, 1, 16)
Chunk = tuple[int, int, int]  # sequence, and its queries [begin, end)


@pytest.fixture(params=[(80, 16), (90, 64)], ids=["pointers", "boxes"])
def block_size(request: pytest.FixtureRequest) -> Iterator[int]:
    token = compile_target.set(request.param[0])
    yield request.param[1]
    compile_target.reset(token)


def step(batch: PagedBatch, chunks: list[Chunk]) -> PagedBatch:
    """Return a step of these chunks over the caches of a batch of whole prompts; a chunk [0, 0) is padding."""
    device, starts = batch.q.device, batch.meta.cu_seqlens_q.tolist()
    counts = [max(end - begin, 1) for _, begin, end in chunks]
    rows = [
        starts[seq] + begin + i for (seq, begin, _), count in zip(chunks, counts, strict=True) for i in range(count)
    ]
    meta = AttentionMetadata(
        slot_mapping=torch.zeros(len(rows), dtype=torch.int64, device=device),
        block_tables=batch.meta.block_tables[[seq for seq, _, _ in chunks]],
        cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        seq_lens=torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=device),
        max_seqlen_q=max(counts),
        max_seq_len=max(end for _, _, end in chunks),
        num_decodes=next((i for i, count in enumerate(counts) if count > 1), len(counts)),
    )
    return batch._replace(q=batch.q[rows], meta=meta)


def attended(
    batch: PagedBatch,
    window: int,
    cap: float,
    scales: torch.Tensor | None = None,
    function: Callable[..., None] = invariant_attention,
) -> torch.Tensor:
    out = torch.full_like(batch.q, float("nan"))
    function(batch.q, batch.k_cache, batch.v_cache, batch.meta, out, SCALE, window, cap, scales)
    return out


def drawn_steps(seed: int) -> Iterator[list[Chunk]]:
    """Yield steps in which every sequence is cut anew, until each has come to its end, with decodes first."""
    draw, done = random.Random(seed), dict.fromkeys(range(len(LENGTHS)), 0)
    while done:
        chunks = []
        for seq in draw.sample(sorted(done), draw.randint(1, len(done))):
            begin = done[seq]
            end = min(begin + draw.choice((1, 1, 7, 30, 75)), LENGTHS[seq])
            chunks.append((seq, begin, end))
            done[seq] = end
        done = {seq: end for seq, end in done.items() if end < LENGTHS[seq]}
        yield sorted(chunks, key=lambda chunk: chunk[2] - chunk[1] > 1)


def check(whole: PagedBatch, window: int, cap: float, scales: torch.Tensor | None = None) -> None:
    expected, starts = attended(whole, window, cap, scales), whole.meta.cu_seqlens_q.tolist()
    reference = attended(whole, window, cap, scales, paged_attention_reference)
    assert_close("attention", reference, expected, 2 * RATIO[whole.q.dtype])
    for chunks in drawn_steps(0):
        found = attended(step(whole, chunks), window, cap, scales)
        rows = [starts[seq] + query for seq, begin, end in chunks for query in range(begin, end)]
        assert torch.equal(found, expected[rows]), chunks


def prompts(device: str, block_size: int, **shape: object) -> PagedBatch:
    return paged_batch([(length, length) for length in LENGTHS], block_size=block_size, device=device, **shape)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (20, 0.0), (20, 1.5)], ids=str)
def test_16_bits(device: str, block_size: int, window: int, cap: float) -> None:
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # which the interpreter does not multiply
    check(prompts(device, block_size, dtype=dtype, group=3, head_dim=64), window, cap)


@pytest.mark.usefixtures("exact_rows")
def test_float32(device: str, block_size: int) -> None:
    check(prompts(device, block_size, head_dim=24), 20, 0.0)


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("function", [invariant_attention, split_attention], ids=["invariant", "decodes"])
@pytest.mark.parametrize("window", [0, 20])
def test_successive_tokens_of_sequences_in_one_step_equal_decodes_of_their_own(
    device: str, block_size: int, window: int, function: Callable[..., None]
) -> None:
    """All keys are in the cache before attention reads one, those of later tokens too."""
    whole = prompts(device, block_size)
    tokens = [(0, range(60, 69)), (1, range(32, 33)), (3, range(16)), (2, range(1))]
    entries = [(seq, position, position + 1) for seq, positions in tokens for position in positions]
    entries.insert(9, (1, 0, 0))  # padding
    together = attended(step(whole, entries), window, 0.0, function=function)
    alone = torch.cat([attended(step(whole, [entry]), window, 0.0, function=function) for entry in entries])
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("exact_rows")
def test_splits_of_successive_tokens_change_roundings_alone(device: str) -> None:
    whole = paged_batch([(600, 600)], device=device)
    entries = [(0, position, position + 1) for position in range(560, 600)]
    together = attended(step(whole, entries), 0, 0.0, function=split_attention)
    alone = torch.cat([attended(step(whole, [entry]), 0, 0.0, function=split_attention) for entry in entries])
    assert_close("attention", alone, together, RATIO[torch.float32])
    assert not torch.equal(together, alone)


@pytest.mark.usefixtures("exact_rows")
def test_splits_of_decodes_change_a_result(device: str) -> None:
    """What the other kernels do shows in such comparisons."""
    whole = paged_batch([(300, 300)], device=device)
    steps = step(whole, [(0, 298, 300)]), step(whole, [(0, 299, 300)])
    chunk, decode = (attended(one, 0, 0.0)[-1] for one in steps)
    assert torch.equal(chunk, decode)
    chunk, decode = (attended(one, 0, 0.0, function=split_attention)[-1] for one in steps)
    assert not torch.equal(chunk, decode)


@pytest.mark.usefixtures("exact_rows")
def test_cache_of_8_bits(device: str, block_size: int) -> None:
    whole, scales = quantised(prompts(device, block_size, dtype=torch.float16))
    check(whole, 0, 0.0, scales)


def test_padding_among_decodes(device: str, block_size: int) -> None:
    whole = prompts(device, block_size, dtype=torch.float16)
    found = attended(step(whole, [(3, 0, 0), (1, 32, 33), (0, 0, 0)]), 0, 0.0)
    assert not found[0].any() and not found[2].any()
    torch.testing.assert_close(found[1:2], attended(step(whole, [(1, 32, 33)]), 0, 0.0))


def test_the_operation() -> None:
    batch = step(prompts("cpu", 16), [(0, 74, 75), (1, 0, 33)])
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.meta)
    expected = paged_attention(*arguments, scale=SCALE)
    torch.testing.assert_close(paged_attention(*arguments, scale=SCALE, invariant=True), expected)
