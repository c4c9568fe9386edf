"""transformers' attention interface, pointed at the paged cache.

The attention of this step travels as a keyword argument through the forward pass of the model, so there is no state
outside of it: what a model does not hand down to its layers is found by the probe when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from tidewheel.models.base import KVLayer
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

IMPLEMENTATION = "tidewheel"  # the name under which transformers knows `attention_forward`
KEYWORD = "tidewheel_attention"


class AttentionCall(NamedTuple):
    """One layer's call, as the model made it."""

    module: torch.nn.Module
    query: torch.Tensor  # [1, num_q_heads, T, head_dim], rotated
    key: torch.Tensor  # [1, num_kv_heads, T, head_dim], rotated
    value: torch.Tensor
    scale: float
    sliding_window: int  # 0: off
    soft_cap: float  # 0: off
    mask: object
    others: dict[str, object]  # keyword arguments that the paged attention has no use for

    @property
    def layer(self) -> int:
        index = getattr(self.module, "layer_idx", None)
        if not isinstance(index, int):
            raise ValueError(f"{type(self.module).__name__} does not say which layer it is")
        return index


class AttentionHook(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[T, num_q_heads, head_dim]"""
        ...


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tidewheel_attention: AttentionHook | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls; its signature is that of the library's interface."""
    if tidewheel_attention is None:
        raise ValueError("the model does not hand keyword arguments down to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module, query, key, value, scale, sliding_window or 0, softcap or 0.0, attention_mask, others
    )
    return tidewheel_attention.attend(call).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


class PagedAttention:
    """Writes keys and values of each layer to its cache, then attends over it."""

    def __init__(self, meta: AttentionMetadata, kv_layers: Sequence[KVLayer]) -> None:
        self._meta = meta
        self._kv_layers = kv_layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        k_cache, v_cache = self._kv_layers[call.layer]
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))
        write_kv_cache(key, value, self._meta.slot_mapping, k_cache, v_cache)
        return paged_attention(
            query, k_cache, v_cache, self._meta,
            scale=call.scale, sliding_window=call.sliding_window, soft_cap=call.soft_cap,
        )  # fmt: skip
