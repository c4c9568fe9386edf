"""Rotary grouped-query attention over the paged cache, with one matrix for q, k and v."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tidewheel.models.base import KVLayer
from tidewheel.models.config import ModelConfig
from tidewheel.models.layers import Linear
from tidewheel_kernels import AttentionMetadata, paged_attention, rope_and_cache


class Step(NamedTuple):
    """Inputs that all layers of a forward pass share."""

    positions: torch.Tensor  # [T] int64
    cos_sin: torch.Tensor  # [max_model_len, head_dim] float32
    meta: AttentionMetadata


class Attention:
    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._num_q_heads, self._num_kv_heads = config.num_q_heads, config.num_kv_heads
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._sliding_window = config.sliding_windows[layer]
        self._hidden_size = config.hidden_size
        num_heads = config.num_q_heads + 2 * config.num_kv_heads
        width = config.num_q_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size, num_heads * config.head_dim, bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.output = Linear(width, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device)
        self.q_norm = torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def __call__(self, x: torch.Tensor, step: Step, kv: KVLayer) -> torch.Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        q, k, v = torch.split(heads, [self._num_q_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        rope_and_cache(
            q, k, v, step.cos_sin, step.positions, step.meta.slot_mapping, *kv,
            q_norm_weight=self.q_norm, k_norm_weight=self.k_norm, eps=self._eps,
        )  # fmt: skip
        out = paged_attention(q, *kv, step.meta, scale=self._scale, sliding_window=self._sliding_window)
        return self.output(out.view(x.shape[0], -1))

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        kv_width = self._num_kv_heads * self._head_dim
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {
            **self.qkv.destinations(
                (f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"),
                (self._num_q_heads * self._head_dim, kv_width, kv_width),
            ),
            **self.output.destinations((f"{prefix}o_proj",), (self._hidden_size,)),
            **{f"{prefix}{name}.weight": norm for name, norm in norms.items() if norm is not None},
        }
