"""Interface of a model to the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from tidewheel_kernels import AttentionMetadata

Progress = Callable[[str, float], None]  # stage name, fraction done in [0, 1]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class KVLayer(NamedTuple):
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # like keys
    scales: torch.Tensor | None = None  # [2, num_kv_heads] float32, of keys and values of 8 bits


class ModelShape(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # output width
    hidden_size: int
    intermediate_size: int  # widest activation of a layer


class CausalLM(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def is_capturable(self) -> bool:
        """Return whether `forward` is known to neither wait for the device nor read its values."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int32 or int64
        positions: torch.Tensor,  # [T] int64
        meta: AttentionMetadata,
        kv_layers: Sequence[KVLayer],
        logit_indices: torch.Tensor,  # [S] int64, tokens whose logits are wanted, ascending, unique
    ) -> torch.Tensor:
        """Return logits [S, vocab_size] in the model's dtype or float32."""
        ...


@runtime_checkable
class EmbeddingLM(CausalLM, Protocol):
    """Model whose hidden states can be had."""

    def forward_with_hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        kv_layers: Sequence[KVLayer],
        logit_indices: torch.Tensor,
        hidden_indices: torch.Tensor,  # [P] int64, tokens whose hidden states are wanted
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `forward` does, and the normed states [P, hidden_size] that logits are made of."""
        ...

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [P, vocab_size] of normed states."""
        ...


class AttentionInput(NamedTuple):
    """Forward pass before an attention."""

    queries: torch.Tensor  # [T, num_q_heads, head_dim]
    residual: torch.Tensor  # [T, hidden_size]


class TokenLocations(NamedTuple):
    """Where the tokens of a step are."""

    positions: torch.Tensor  # [T] int64, in their sequences
    slots: torch.Tensor  # [T] int64, in the cache; negative ones are padding


class SplitLayer(Protocol):
    """Layer around its attention, which alone needs more than the number of tokens."""

    def begin(
        self, x: torch.Tensor, residual: torch.Tensor | None, places: TokenLocations, kv: KVLayer
    ) -> AttentionInput:
        """Compute up to the attention; fill the cache. `x` [T, hidden_size] is not yet part of the residual."""
        ...

    def attend(
        self, queries: torch.Tensor, meta: AttentionMetadata, kv: KVLayer, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention [T, num_q_heads, head_dim], in `out` if given."""
        ...

    def end(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x` and the residual for the next layer."""
        ...


@runtime_checkable
class SplitLM(CausalLM, Protocol):
    """Model whose `forward` can be cut at its attentions."""

    @property
    def layers(self) -> Sequence[SplitLayer]: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, hidden_size] of the first layer, whose residual is None."""
        ...

    def logits(self, x: torch.Tensor, residual: torch.Tensor, logit_indices: torch.Tensor) -> torch.Tensor:
        """Return logits [S, vocab_size] from what the last layer returns."""
        ...


def no_progress(stage: str, fraction: float) -> None:
    pass
