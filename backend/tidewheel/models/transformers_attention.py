"""transformers' attention interface, pointed at the paged cache.

The library passes the layer but not the step, and many models drop keyword arguments. So a model's layers share a
slot with the running step's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from tidewheel.models.base import KVLayer
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

IMPLEMENTATION = "tidewheel"  # name in transformers of `attention_forward`
_SLOT = "tidewheel_attention"  # attribute of every module after `install`


class AttentionCall(NamedTuple):
    """Attention call of one layer."""

    module: torch.nn.Module
    query: torch.Tensor  # [1, num_q_heads, T, head_dim], rotated
    key: torch.Tensor  # [1, num_kv_heads, T, head_dim], rotated
    value: torch.Tensor
    scale: float
    sliding_window: int  # 0: off
    soft_cap: float  # 0: off
    mask: object
    others: dict[str, object]  # keyword arguments that paged attention does not use

    @property
    def layer(self) -> int:
        index = getattr(self.module, "layer_idx", None)
        if not isinstance(index, int):
            raise ValueError(f"{type(self.module).__name__} does not say which layer it is")
        return index


class AttentionHook(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return [T, num_q_heads, head_dim]."""
        ...


class AttentionSlot:
    """Attention of a model's running step. One thread only."""

    def __init__(self) -> None:
        self._hook: AttentionHook | None = None

    @contextmanager
    def holding(self, hook: AttentionHook) -> Iterator[None]:
        """Use `hook` in all layers within the context."""
        self._hook = hook
        try:
            yield
        finally:
            self._hook = None

    @property
    def hook(self) -> AttentionHook:
        if self._hook is None:
            raise ValueError("attention is called outside of a step")
        return self._hook


def install(model: torch.nn.Module) -> AttentionSlot:
    """Return a slot shared by the layers of `model` only."""
    slot = AttentionSlot()
    for module in model.modules():
        setattr(module, _SLOT, slot)
    return slot


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Called by transformers, which sets the signature."""
    slot: AttentionSlot = getattr(module, _SLOT)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module, query, key, value, scale, sliding_window or 0, softcap or 0.0, attention_mask, others
    )
    return slot.hook.attend(call).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


class PagedAttention:
    """Writes each layer's keys and values to its cache, then attends over it."""

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
