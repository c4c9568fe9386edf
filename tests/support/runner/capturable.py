"""Operations of a decode step in plain torch that never read values on the host: what the kernels are on a GPU.

The CPU implementations plan with host values, which is what a graph cannot hold, and native kernels are no operations
that could be recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from tidewheel_kernels import (
    AttentionMetadata,
    activation,
    attention,
    grouped_linear,
    kv_cache,
    lora,
    norm,
    packed_linear,
    rope,
    sampling,
)
from tidewheel_kernels.activation.cpu import silu_and_mul_cpu
from tidewheel_kernels.attention.cpu import paged_attention_cpu
from tidewheel_kernels.kv_cache.reference import scales_of, stored
from tidewheel_kernels.lora.reference import add_lora_reference
from tidewheel_kernels.lora.stacks import LoraStack, StaticLoraStack
from tidewheel_kernels.norm.cpu import rms_norm_cpu
from tidewheel_kernels.norm.reference import normalized
from tidewheel_kernels.rope.reference import rotate_neox
from tidewheel_kernels.sampling import parts
from tidewheel_kernels.sampling.reference import greedy_tokens, sample_reference


@contextmanager
def installed() -> Iterator[None]:
    """Run these operations on a CPU in place of its own."""
    with ExitStack() as stack:
        for operation, function in (
            (attention._OP, paged_attention),
            (rope._OP, rope_and_cache),
            (kv_cache._WRITE, write_kv_cache),
            (sampling._OP, sample_reference),
            (norm._OP, rms_norm_cpu),
            (activation._OP, silu_and_mul_cpu),
            (lora._OP, add_lora),
        ):
            stack.enter_context(
                mock.patch.object(operation, "chosen", defaultdict(lambda function=function: function))
            )
        stack.enter_context(mock.patch.object(parts, "greedy_tokens_cpu", greedy_tokens))
        yield


@contextmanager
def products_of_torch() -> Iterator[None]:
    """Multiply any number of rows by operations of torch, so that steps of different sizes round alike."""
    with (
        mock.patch.object(packed_linear, "_blocked", return_value=None),
        mock.patch.object(grouped_linear, "native_library", return_value=None),
    ):
        yield


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    """Attend; steps with prompts belong to no graph and run as always."""
    if meta.num_decodes < meta.num_seqs:
        return paged_attention_cpu(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, scales)
    out.copy_(decode_attention(q, k_cache, v_cache, meta, scale, sliding_window, soft_cap, scales))
    return None


def decode_attention(
    q: torch.Tensor,  # [B, num_q_heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Gather the keys of `max_seq_len` positions of every row, then mask the absent ones."""
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    positions = torch.arange(meta.max_seq_len)
    seq_lens = meta.seq_lens.unsqueeze(1)
    visible = positions < seq_lens
    if sliding_window:
        visible = visible & (positions >= seq_lens - sliding_window)
    blocks = torch.where(visible, meta.block_tables.index_select(1, positions // block_size), 0).long()
    slots = (blocks * block_size + positions % block_size).flatten()
    keys, values = (
        torch.where(
            visible[..., None, None],
            cache.flatten(0, 1).index_select(0, slots).float().unflatten(0, (len(q), -1))
            * (1.0 if of_heads is None else of_heads[:, None]),
            0,
        ).repeat_interleave(group, dim=2)
        for cache, of_heads in zip((k_cache, v_cache), scales_of(scales), strict=True)
    )
    logits = torch.einsum("bhd,bkhd->bhk", q.float(), keys) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    weights = torch.softmax(logits.masked_fill(~visible[:, None, :], float("-inf")), dim=-1)
    weights = torch.where(visible[:, None, :], weights, 0)  # a row that sees no key has a softmax of NaN
    return torch.einsum("bhk,bkhd->bhd", weights, values).to(q.dtype)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    eps: float,
    scales: torch.Tensor | None,
) -> None:
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for heads, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        normed = heads.float() if weight is None else normalized(heads.float(), weight, eps)
        heads.copy_(rotate_neox(normed, cos, sin))
    write_kv_cache(k, v, slot_mapping, k_cache, v_cache, scales)


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    for cache, values, of_heads in zip((k_cache, v_cache), (k, v), scales_of(scales), strict=True):
        # torch copies no rows of 8-bit floats.
        is_scaled = of_heads is not None
        kept, bits = stored(values, cache.dtype, of_heads), torch.uint8 if is_scaled else cache.dtype
        write_cache(kept.view(bits), slot_mapping, cache.view(bits))


def write_cache(values: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor) -> None:
    """Write the cache; padding repeats the write of the first row, and padding alone writes nothing."""
    flat = cache.view(-1, *values.shape[1:])
    first = slot_mapping[:1].clamp(min=0)
    written = torch.where((slot_mapping[:1] >= 0)[:, None, None], values[:1], flat.index_select(0, first))
    is_padding = slot_mapping < 0
    flat.index_copy_(
        0, torch.where(is_padding, first, slot_mapping), torch.where(is_padding[:, None, None], written, values)
    )


def add_lora(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, groups: lora.LoraGroups) -> None:
    if not isinstance(stack, StaticLoraStack):
        return add_lora_reference(out, x, stack, groups)
    tokens, slots = groups.tokens.view(-1, lora.TILE), groups.slots.clamp(min=0)
    places = tokens.clamp(min=0).flatten()
    is_rank = (torch.arange(stack.sizes.max_rank) < stack.ranks.index_select(0, slots)[..., None])[..., None]
    a = torch.where(is_rank, stack.a.index_select(0, slots).float(), 0)  # [tiles, parts, ranks, inputs]
    products = torch.einsum("mti,mpri->mptr", x.index_select(0, places).float().view(len(slots), lora.TILE, -1), a)
    outputs = stack.b.index_select(0, slots).float().split(stack.sizes.part_sizes, 2)
    sums = torch.cat([products[:, p] @ torch.where(is_rank[:, p], b, 0) for p, b in enumerate(outputs)], -1)
    sums = torch.where((tokens >= 0)[..., None], sums, 0).flatten(0, 1)
    out.copy_(out.float().index_add(0, places, sums))
    return None
