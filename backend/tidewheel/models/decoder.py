"""Native decoder: Llama, Mistral, Qwen2 and Qwen3 are one program with different flags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from tidewheel.models.attention import Attention, Step
from tidewheel.models.base import KVLayer, ModelShape
from tidewheel.models.config import ModelConfig
from tidewheel.models.layers import GatedMLP, Linear
from tidewheel.models.rope import cos_sin_table
from tidewheel_kernels import AttentionMetadata, rms_norm


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
