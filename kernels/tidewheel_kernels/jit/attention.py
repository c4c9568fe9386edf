"""Launchers of paged attention: decode rows use the split-KV kernel, others the prefill kernel."""

# mypy: allow-untyped-calls

import math

import torch

from tidewheel_kernels.jit.decode_attention import decode_attention_kernel, merge_splits_kernel
from tidewheel_kernels.jit.descriptors import box_descriptor
from tidewheel_kernels.jit.prefill_attention import prefill_attention_kernel
from tidewheel_kernels.launch_config import (
    AttentionConfig,
    architecture,
    decode_config,
    multiprocessors,
    next_power_of_2,
    num_kv_splits,
    prefill_config,
)
from tidewheel_kernels.metadata import AttentionMetadata

LOG2_E = math.log2(math.e)
# Holds all splits of one sequence with eight KV heads; a chunk without splits costs nothing.
MERGE_BLOCK_SPLITS = 64


def paged_attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    meta: AttentionMetadata,
    out: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    shape = (q.shape[2], q.shape[1] // k_cache.shape[2], k_cache.shape[1], q.element_size())
    arguments = _shape_arguments(q, k_cache, v_cache) | _mask_arguments(scale, sliding_window, soft_cap)
    if meta.num_decodes:
        _decode(q, k_cache, v_cache, out, meta, arguments, decode_config(*shape))
    if meta.num_seqs > meta.num_decodes:
        _prefill(q, k_cache, v_cache, out, meta, arguments, prefill_config(*shape, architecture(q.device)))


def _shape_arguments(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, object]:
    return {
        "q_ptr": q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_block_stride": k_cache.stride(0),
        "k_offset_stride": k_cache.stride(1),
        "k_head_stride": k_cache.stride(2),
        "v_block_stride": v_cache.stride(0),
        "v_offset_stride": v_cache.stride(1),
        "v_head_stride": v_cache.stride(2),
        "GROUP": q.shape[1] // k_cache.shape[2],
        "HEAD_DIM": q.shape[2],
        "BLOCK_SIZE": k_cache.shape[1],
    }


def _mask_arguments(scale: float, sliding_window: int, soft_cap: float) -> dict[str, object]:
    """See `attend_tiles` for `logit_scale`. Soft-capped logits are in units of the cap."""
    return {
        "logit_scale": 2.0 * LOG2_E * scale / soft_cap if soft_cap else LOG2_E * scale,
        "soft_cap_log2": soft_cap * LOG2_E,
        "sliding_window": sliding_window,
        "HAS_SOFT_CAP": soft_cap > 0,
        "HAS_WINDOW": sliding_window > 0,
    }


def _config_arguments(config: AttentionConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    meta: AttentionMetadata,
    arguments: dict[str, object],
    config: AttentionConfig,
) -> None:
    num_q_heads, num_kv_heads = q.shape[1], k_cache.shape[2]
    first = meta.num_decodes
    num_seqs = meta.num_seqs - first
    block_q = config.block_m // (num_q_heads // num_kv_heads)
    grid = ((q.shape[0] - first) // block_q + num_seqs, num_kv_heads)
    box = (1, config.block_n, 1, config.block_d)
    prefill_attention_kernel[grid](
        k_cache=box_descriptor(k_cache, box) if config.tma else k_cache,
        v_cache=box_descriptor(v_cache, box) if config.tma else v_cache,
        out_ptr=out,
        block_tables_ptr=meta.block_tables,
        cu_seqlens_ptr=meta.cu_seqlens_q,
        seq_lens_ptr=meta.seq_lens,
        first_seq=first,
        num_seqs=num_seqs,
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        block_table_stride=meta.block_tables.stride(0),
        TMA=config.tma,
        **arguments,
        **_config_arguments(config),
    )


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    meta: AttentionMetadata,
    arguments: dict[str, object],
    config: AttentionConfig,
) -> None:
    num_seqs, num_q_heads, num_kv_heads = meta.num_decodes, q.shape[1], k_cache.shape[2]
    num_splits = num_kv_splits(num_seqs, num_kv_heads, meta.max_seq_len, multiprocessors(q.device))
    partial, log2_sum = out, out
    if num_splits > 1:
        log2_sum = torch.empty((num_seqs, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
        partial = torch.empty((*log2_sum.shape, q.shape[2]), dtype=torch.float32, device=q.device)
    decode_attention_kernel[(num_kv_heads, num_seqs, num_splits)](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        out_ptr=partial,
        log2_sum_ptr=log2_sum,
        block_tables_ptr=meta.block_tables,
        seq_lens_ptr=meta.seq_lens,
        num_q_heads=num_q_heads,
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        block_table_stride=meta.block_tables.stride(0),
        SPLIT=num_splits > 1,
        **arguments,
        **_config_arguments(config),
    )
    if num_splits > 1:
        merge_splits_kernel[(num_q_heads, num_seqs)](
            partial_ptr=partial,
            log2_sum_ptr=log2_sum,
            out_ptr=out,
            seq_lens_ptr=meta.seq_lens,
            sliding_window=arguments["sliding_window"],
            num_splits=num_splits,
            out_token_stride=out.stride(0),
            out_head_stride=out.stride(1),
            HAS_WINDOW=arguments["HAS_WINDOW"],
            HEAD_DIM=q.shape[2],
            BLOCK_N=config.block_n,
            BLOCK_SPLITS=MERGE_BLOCK_SPLITS,
            BLOCK_D=next_power_of_2(q.shape[2]),
            num_warps=4,
        )
