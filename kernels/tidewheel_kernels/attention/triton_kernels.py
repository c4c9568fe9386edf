"""Launch the split-KV kernel for decode rows and the prefill kernel for all others."""

import math

import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.triton_decode import launch_decode
from tidewheel_kernels.attention.triton_prefill import launch_prefill
from tidewheel_kernels.launch_config import AttentionConfig, architecture, decode_config, prefill_config

LOG2_E = math.log2(math.e)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    shape = (q.shape[2], q.shape[1] // k_cache.shape[2], k_cache.shape[1], q.element_size())
    arguments = _tensor_arguments(q, k_cache, v_cache, meta, out) | _mask_arguments(scale, sliding_window, soft_cap)
    if meta.num_decodes:
        config = decode_config(*shape)
        launch_decode(q, k_cache, v_cache, meta, out, config, arguments | _config_arguments(config))
    if meta.num_seqs > meta.num_decodes:
        config = prefill_config(*shape, architecture(q.device))
        launch_prefill(q, k_cache, v_cache, meta, out, config, arguments | _config_arguments(config))


def _tensor_arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor
) -> dict[str, object]:
    return {
        "q_ptr": q,
        "block_tables_ptr": meta.block_tables,
        "seq_lens_ptr": meta.seq_lens,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "block_table_stride": meta.block_tables.stride(0),
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
    # With a soft cap, logits are in units of it.
    return {
        "logit_scale": 2.0 * LOG2_E * scale / soft_cap if soft_cap else LOG2_E * scale,
        "soft_cap_log2": soft_cap * LOG2_E,
        "sliding_window": sliding_window,
        "HAS_SOFT_CAP": soft_cap > 0,
        "HAS_WINDOW": sliding_window > 0,
    }


def _config_arguments(config: AttentionConfig) -> dict[str, object]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
