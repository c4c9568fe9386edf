"""Native decoder: Llama, Mistral, Qwen2 and Qwen3 are one program with different flags.

Its layers are plain classes, without a module tree on the hot path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear, pad

from tidewheel.models.causal_lm import KVLayer, ModelShape
from tidewheel.models.decoder_config import ModelConfig
from tidewheel.models.rope_table import cos_sin_table
from tidewheel_kernels import AttentionMetadata, paged_attention, rms_norm, rope_and_cache, silu_and_mul

# Rows that oneDNN optimises its layout for: the layout for 16 and more is also better for fewer.
PACKED_ROWS = 64
FINELY_PADDED_ROWS = 64


class Linear:
    """``x @ weight.T + bias``.

    On a CPU `pack` stores oneDNN's blocked layout: up to three times as fast as plain GEMM for a decode step's few
    rows.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        if self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)
            self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        extra = padded_rows(num_rows) - num_rows
        if extra:
            x = pad(x, (0, 0, 0, extra))
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return packed[:num_rows]

    def destinations(self, names: Sequence[str], sizes: Sequence[int]) -> dict[str, torch.Tensor]:
        """Map names of parts of a fused weight, and bias, to views."""
        parts = {
            f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, list(sizes)), strict=True)
        }
        if self.bias is not None:
            biases = torch.split(self.bias, list(sizes))
            parts |= {f"{name}.bias": part for name, part in zip(names, biases, strict=True)}
        return parts


def padded_rows(num_rows: int) -> int:
    """Round up: by at most one row for a decode step, by a quarter for more.

    oneDNN keeps half a megabyte for each of up to a thousand row counts, so unrounded counts would take hundreds of
    megabytes. Time grows with the rows.
    """
    steps = 32 if num_rows <= FINELY_PADDED_ROWS else 8
    step = max(1, (1 << max(num_rows - 1, 0).bit_length()) // steps)
    return -(-num_rows // step) * step


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch and CPU have oneDNN's packed linear layer for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._intermediate_size = intermediate_size
        self._hidden_size = hidden_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        gate_up = (f"{prefix}gate_proj", f"{prefix}up_proj")
        return {
            **self.gate_up.destinations(gate_up, (self._intermediate_size,) * 2),
            **self.down.destinations((f"{prefix}down_proj",), (self._hidden_size,)),
        }


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


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = config.rms_norm_eps
        self.input_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv: KVLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's output and the sum before it, both [T, hidden]; the next norm adds them."""
        normed, residual = add_norm(x, residual, self.input_norm, self._eps)
        normed, residual = add_norm(self.attention(normed, step, kv), residual, self.mlp_norm, self._eps)
        return self.mlp(normed), residual

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm,
            **self.attention.destinations(f"{prefix}self_attn."),
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm,
            **self.mlp.destinations(f"{prefix}mlp."),
        }


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm of ``x + residual``, and that sum."""
    result = rms_norm(x, weight, eps, residual)
    return result if isinstance(result, tuple) else (result, x)


class Decoder:
    """Native `CausalLM`: fill all `destinations()`, then call `pack`."""

    is_capturable = True

    def __init__(self, config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, i, dtype=dtype, device=device) for i in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len, device)
        self.weights_bytes = sum(tensor.nbytes for tensor in self.destinations().values())

    @property
    def shape(self) -> ModelShape:
        config = self.config
        return ModelShape(
            config.num_layers, config.num_kv_heads, config.head_dim, config.vocab_size, config.hidden_size,
            config.intermediate_size,
        )  # fmt: skip

    def destinations(self) -> dict[str, torch.Tensor]:
        """Map names of a Hugging Face checkpoint to tensors; parts of a fused matrix are views."""
        parts = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for i, layer in enumerate(self.layers):
            parts |= layer.destinations(f"model.layers.{i}.")
        if not self.config.tie_word_embeddings:
            parts |= self.lm_head.destinations(("lm_head",), (self.config.vocab_size,))
        return parts

    def ignores(self, name: str) -> bool:
        """True for tables of old exports and the copy of a tied matrix."""
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings)

    def pack(self) -> None:
        for layer in self.layers:
            layer.pack()
        self.lm_head.pack()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        kv_layers: Sequence[KVLayer],
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        step = Step(positions, self.cos_sin, meta)
        hidden = embedding(token_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, kv in zip(self.layers, kv_layers, strict=True):
            hidden, residual = layer(hidden, residual, step, kv)
        assert residual is not None, "a decoder has at least one layer"
        if len(logit_indices) < len(hidden):  # else all tokens, in order
            hidden, residual = hidden.index_select(0, logit_indices), residual.index_select(0, logit_indices)
        normed, _ = add_norm(hidden, residual, self.norm, self.config.rms_norm_eps)
        return self.lm_head(normed)
