"""Paged batches with poisoned caches, and the comparison of kernels with references."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.kv_cache.codes import INT8, codes_of, head_bytes, rounded, scales_behind
from tidewheel_kernels.kv_cache.reference import FP8, stored

NAN = float("nan")
needs_compiler = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="needs a C compiler")
# Relative RMS error that rounding explains: inputs and output in the dtype, arithmetic in float32.
RATIO = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close(name: str, ref: torch.Tensor, tri: torch.Tensor, ratio: float) -> None:
    """Check for the same shape and dtype, no NaN, and a relative RMS difference below `ratio`."""
    assert ref.shape == tri.shape and ref.dtype == tri.dtype, (
        f"{name}: {ref.shape} {ref.dtype}, {tri.shape} {tri.dtype}"
    )
    assert not ref.isnan().any(), f"{name}: NaN in the reference"
    assert not tri.isnan().any(), f"{name}: {int(tri.isnan().sum())} of {tri.numel()} elements are NaN"
    expected, got = ref.double(), tri.double()
    error = (expected - got).square().sum().sqrt() / expected.square().sum().sqrt().clamp(min=1e-12)
    assert error < ratio, f"{name}: relative RMS error {error:.2e}, allowed {ratio:.0e}"


def drawn_scales(num_kv_heads: int, device: str = "cpu") -> torch.Tensor:
    """Return scales [2, num_kv_heads] of which no two heads have the same."""
    order = torch.randperm(2 * num_kv_heads, generator=torch.Generator().manual_seed(1))
    return (2.0 ** -order.view(2, num_kv_heads)).to(device)


class PagedBatch(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata


def paged_batch(
    lengths: Sequence[tuple[int, int]],  # (query_len, seq_len) of each sequence, decodes first
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """Make random queries, and caches that hold NaN wherever no sequence has a token; block tables end in -1."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = [query_len for query_len, _ in lengths]
    seq_lens = [seq_len for _, seq_len in lengths]
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    blocks = torch.randperm(sum(num_blocks) + 2, generator=generator).to(torch.int32)
    block_tables = torch.full((len(lengths), max(num_blocks, default=0) + 1), -1, dtype=torch.int32)
    caches = torch.full((2, len(blocks), block_size, num_kv_heads, head_dim), NAN)
    used = 0
    for i, seq_len in enumerate(seq_lens):
        mine = blocks[used : used + num_blocks[i]]
        used += num_blocks[i]
        block_tables[i, : len(mine)] = mine
        tokens = torch.full((2, len(mine) * block_size, num_kv_heads, head_dim), NAN)
        tokens[:, :seq_len] = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator)
        caches[:, mine.long()] = tokens.view(2, len(mine), block_size, num_kv_heads, head_dim)
    caches = caches.to(device, dtype)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens = int(starts[-1])
    q = torch.randn(num_tokens, num_kv_heads * group, head_dim, generator=generator).to(device, dtype)
    meta = AttentionMetadata(
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        block_tables=block_tables.to(device),
        cu_seqlens_q=torch.from_numpy(starts).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        max_seqlen_q=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        num_decodes=_leading_ones(query_lens),
    )
    return PagedBatch(q, caches[0], caches[1], meta)


def quantised(batch: PagedBatch) -> tuple[PagedBatch, torch.Tensor]:
    """Return the batch with caches of 8 bits, and their scales."""
    scales = drawn_scales(batch.k_cache.shape[2], str(batch.q.device))
    k_cache, v_cache = (stored(cache, FP8, s) for cache, s in zip(batch[1:3], scales, strict=True))
    return batch._replace(k_cache=k_cache, v_cache=v_cache), scales


def rounded_cache(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of codes with the keys or values of a cache of floats."""
    codes, scales = rounded(cache)
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    size = num_blocks, block_size * num_kv_heads * head_bytes(head_dim, INT8)
    made = codes_of(torch.empty(size, dtype=INT8), block_size, num_kv_heads, head_dim)
    made.copy_(codes)
    scales_behind(made).copy_(scales)
    return made


def _leading_ones(query_lens: Sequence[int]) -> int:
    return next((i for i, query_len in enumerate(query_lens) if query_len != 1), len(query_lens))
