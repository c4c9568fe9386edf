from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.lora import LoraGroups

Progress = Callable[[str, float], None]  # stage, fraction in [0, 1]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVLayer(NamedTuple):
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # like keys
    scales: torch.Tensor | None = None  # [2, num_kv_heads] float32, for 8 bits


class ModelShape(NamedTuple):
    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # widest activation of a layer on this rank


class EncoderInput(NamedTuple):
    layers: Sequence[KVLayer]  # cross-attention keys and values
    meta: AttentionMetadata  # each token of the step is a sequence of its own, whose keys are an encoded input


class ForwardInput(NamedTuple):
    """Inputs of a step: T tokens, S of which give logits."""

    token_ids: torch.Tensor  # [T] int32 or int64
    positions: torch.Tensor  # [T] int64
    meta: AttentionMetadata
    kv_layers: Sequence[KVLayer]
    logit_indices: torch.Tensor  # [S] int64, ascending, unique
    encoder: EncoderInput | None = None  # of a decoder with cross-attention
    lora: LoraGroups | None = None  # tokens with adapters; None: none has one


class CausalLM(Protocol):
    shape: ModelShape
    weights_bytes: int
    is_capturable: bool  # `forward` never waits for the device

    def forward(self, step: ForwardInput) -> torch.Tensor:
        """Return logits [S, vocab_size], or this rank's part of them, in the model's dtype or float32."""

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and states of tokens `indices` [P] int64: normed hidden states, or logits [P, vocab]."""

    def logits_of(self, states: torch.Tensor) -> torch.Tensor: ...


class AttentionInput(NamedTuple):
    queries: torch.Tensor  # [T, num_q_heads, head_dim]
    residual: torch.Tensor  # [T, hidden_size]


class TokenLocations(NamedTuple):
    positions: torch.Tensor  # [T] int64, in the sequence
    slots: torch.Tensor  # [T] int64, in the cache; negative: padding
    lora: LoraGroups | None = None


def no_progress(stage: str, fraction: float) -> None:
    pass
