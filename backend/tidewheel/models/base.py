"""The one interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from tidewheel_kernels import AttentionMetadata

KVLayer = tuple[torch.Tensor, torch.Tensor]  # keys and values, [num_blocks, block_size, num_kv_heads, head_dim] each
Progress = Callable[[str, float], None]  # name of the stage, fraction done in [0, 1]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelShape(NamedTuple):
    """What the runner sizes its tables by."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # output width
    hidden_size: int
    intermediate_size: int  # the widest activation of a layer


class CausalLM(Protocol):
    """A decoder whose attention reads and writes the paged cache."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def is_capturable(self) -> bool:
        """Whether `forward` is known never to wait for the device nor to read its values, as a CUDA graph demands."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int32 or int64
        positions: torch.Tensor,  # [T] int64
        meta: AttentionMetadata,
        kv_layers: Sequence[KVLayer],
        logit_indices: torch.Tensor,  # [S] int64, tokens whose logits are wanted, ascending, each once
    ) -> torch.Tensor:
        """Logits [S, vocab_size] of the chosen tokens, in the dtype of the model."""
        ...


def no_progress(stage: str, fraction: float) -> None:
    """For callers that do not watch."""
