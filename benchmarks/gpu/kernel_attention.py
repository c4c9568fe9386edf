"""Attention on equal shapes: Tidewheel's over a paged cache, others over their own layout."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu.timing import Call, KernelCase
from tidewheel_kernels import FP8, AttentionMetadata, paged_attention

ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Equal sequences of `context` tokens, `query` of them new."""

    batch: int
    context: int
    query: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    fp8: bool = False  # keys and values of 8 bits, for Tidewheel alone

    @property
    def label(self) -> str:
        shape = f"{self.heads}:{self.kv_heads} heads, batch {self.batch}, context {self.context}"
        return f"{shape}, 8 bits" if self.fp8 else shape

    @property
    def num_bytes(self) -> int:
        kv = 2 * self.context * self.kv_heads * (1 if self.fp8 else ELEMENT_BYTES)
        return self.batch * self.head_dim * (kv + ELEMENT_BYTES * 2 * self.query * self.heads)

    @property
    def flops(self) -> float:
        """Two products over the keys each query sees."""
        seen = self.query * (self.context - self.query) + self.query * (self.query + 1) / 2
        return 4.0 * self.batch * self.heads * self.head_dim * seen

    def by(self, who: str, make: MakeAttention) -> KernelCase:
        """Return the case as run by `make`: decodes bound by bandwidth, prompts by arithmetic."""
        name, flops = ("prefill attention", self.flops) if self.query > 1 else ("decode attention", 0.0)
        return KernelCase(name, self.label, self.num_bytes, {who: partial(make, self)}, flops)


MakeAttention = Callable[[AttentionCase, torch.device], Call]


def ours(case: AttentionCase, device: torch.device) -> Call:
    k_cache, v_cache, tables = _paged(case, device)
    q = torch.randn(case.batch * case.query, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    out, meta, scale = torch.empty_like(q), _metadata(case, tables, device), case.head_dim**-0.5
    scales = None
    if case.fp8:
        k_cache, v_cache, scales = k_cache.to(FP8), v_cache.to(FP8), torch.ones(2, case.kv_heads, device=device)

    return lambda: paged_attention(q, k_cache, v_cache, meta, scale=scale, out=out, scales=scales)


def _paged(case: AttentionCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values in blocks, and block tables, scattered as in service."""
    blocks_each = -(-case.context // case.block_size)
    shape = (case.batch * blocks_each, case.block_size, case.kv_heads, case.head_dim)
    k_cache, v_cache = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    return k_cache, v_cache, torch.randperm(shape[0], device=device).int().view(case.batch, blocks_each)


def _metadata(case: AttentionCase, tables: torch.Tensor, device: torch.device) -> AttentionMetadata:
    cu_seqlens = np.arange(0, (case.batch + 1) * case.query, case.query, dtype=np.int32)
    seq_lens = np.full(case.batch, case.context, dtype=np.int32)
    return AttentionMetadata(
        slot_mapping=torch.full((case.batch * case.query,), -1, dtype=torch.int64, device=device),
        block_tables=tables,
        cu_seqlens_q=torch.from_numpy(cu_seqlens).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        max_seqlen_q=case.query,
        max_seq_len=case.context,
        num_decodes=case.batch if case.query == 1 else 0,
        cu_seqlens_q_cpu=cu_seqlens,
        seq_lens_cpu=seq_lens,
    )


def _dense(case: AttentionCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as [batch, heads, tokens, head_dim]."""
    sizes = ((case.heads, case.query), (case.kv_heads, case.context), (case.kv_heads, case.context))
    q, k, v = (
        torch.randn(case.batch, heads, length, case.head_dim, device=device, dtype=torch.bfloat16)
        for heads, length in sizes
    )
    return q, k, v


def torch_sdpa(case: AttentionCase, device: torch.device) -> Call:
    q, k, v = _dense(case, device)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=case.query > 1, enable_gqa=True)


def flex_attention(case: AttentionCase, device: torch.device) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    q, k, v = _dense(case, device)
    mask = None
    if case.query > 1:
        mask = create_block_mask(_is_causal, None, None, case.query, case.context, device=str(device))
    compiled: Any = torch.compile(attend, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _is_causal(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return query >= key


def flash_attention_3() -> MakeAttention | None:
    """Return None without `flash_attn_interface`; decodes read a paged cache, prompts dense keys."""
    try:
        library: Any = importlib.import_module("flash_attn_interface")
    except (ImportError, OSError):
        return None

    def make(case: AttentionCase, device: torch.device) -> Call:
        if case.query > 1:
            q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in _dense(case, device))
            return lambda: library.flash_attn_func(q, k, v, causal=True)
        k_cache, v_cache, tables = _paged(case, device)
        q = torch.randn(case.batch, 1, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
        lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        return lambda: library.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, page_table=tables, causal=True
        )

    return make
