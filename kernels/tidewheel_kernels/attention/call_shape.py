from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.launch_config import AttentionConfig

LOG2_E = math.log2(math.e)


class CallShape(NamedTuple):
    q_stride: tuple[int, ...]
    out_stride: tuple[int, ...]
    k_stride: tuple[int, ...]
    v_stride: tuple[int, ...]
    table_stride: int
    num_q_heads: int
    head_dim: int
    num_kv_heads: int
    block_size: int
    scale: float
    sliding_window: int
    soft_cap: float

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def constants(self, config: AttentionConfig) -> dict[str, int | float | bool]:
        return {
            # With a soft cap, logits are in units of it.
            "logit_scale": (2.0 / self.soft_cap if self.soft_cap else 1.0) * LOG2_E * self.scale,
            "soft_cap_log2": self.soft_cap * LOG2_E,
            "sliding_window": self.sliding_window,
            "q_token_stride": self.q_stride[0],
            "q_head_stride": self.q_stride[1],
            "out_token_stride": self.out_stride[0],
            "out_head_stride": self.out_stride[1],
            "block_table_stride": self.table_stride,
            "k_block_stride": self.k_stride[0],
            "k_offset_stride": self.k_stride[1],
            "k_head_stride": self.k_stride[2],
            "v_block_stride": self.v_stride[0],
            "v_offset_stride": self.v_stride[1],
            "v_head_stride": self.v_stride[2],
            "HAS_SOFT_CAP": self.soft_cap > 0,
            "HAS_WINDOW": self.sliding_window > 0,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": self.block_size,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
        }


def call_shape(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> CallShape:
    _, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    return CallShape(
        q.stride(), out.stride(), k_cache.stride(), v_cache.stride(), meta.block_tables.stride(0),
        num_q_heads, head_dim, num_kv_heads, block_size, scale, sliding_window, soft_cap,
    )  # fmt: skip
