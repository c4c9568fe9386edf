"""transformers' attention interface, pointed at the paged cache.

The function that the library calls is told the layer, not the step. Each model therefore has a slot, known to all its
layers, that holds the attention of the step that runs; many models drop keyword arguments on the way to their layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from tidewheel.models.base import KVLayer
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

IMPLEMENTATION = "tidewheel"  # the name under which transformers knows `attention_forward`
_SLOT = "tidewheel_attention"  # attribute of every module of a model that `install` was called for


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


class AttentionSlot:
    """The attention of the step that runs, of one model. One thread only."""

    def __init__(self) -> None:
        self._hook: AttentionHook | None = None

    @contextmanager
    def holding(self, hook: AttentionHook) -> Iterator[None]:
        """Every layer of the model attends through `hook` inside."""
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
    """A slot that all layers of `model`, and no other model, look into."""
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
    """The function that transformers calls; its signature is that of the library's interface."""
    slot: AttentionSlot = getattr(module, _SLOT)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module, query, key, value, scale, sliding_window or 0, softcap or 0.0, attention_mask, others
    )
    return slot.hook.attend(call).unsqueeze(0), None


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
