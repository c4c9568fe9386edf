"""transformers' attention interface on the paged cache, and a probe that both compute the same.

The library passes the layer but not the step, so all layers share a slot with the step's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import KVLayer
from tidewheel.models.model_folder import one_line
from tidewheel.models.trial_prompt import TOLERANCE, one_sequence, random_tokens, relative_difference
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

IMPLEMENTATION = "tidewheel"
_SLOT = "tidewheel_attention"
NO_INTERFACE = "its attention does not go through transformers' interface"
NUM_TOKENS = 16
# Arguments that do not change the attention.
HARMLESS = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


class AttentionCall(NamedTuple):
    module: torch.nn.Module
    query: torch.Tensor  # [1, num_q_heads, T, head_dim], rotated
    key: torch.Tensor  # [1, num_kv_heads, T, head_dim], rotated
    value: torch.Tensor
    scale: float
    sliding_window: int  # 0: off
    soft_cap: float  # 0: off
    mask: object
    others: dict[str, object]

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
    """Holder of the running step's attention; one thread."""

    def __init__(self) -> None:
        self._hook: AttentionHook | None = None

    @contextmanager
    def holding(self, hook: AttentionHook) -> Iterator[None]:
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
    slot: AttentionSlot = getattr(module, _SLOT)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(
        module, query, key, value, scale, sliding_window or 0, softcap or 0.0, attention_mask, others
    )
    return slot.hook.attend(call).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


class PagedAttention:
    def __init__(self, meta: AttentionMetadata, kv_layers: Sequence[KVLayer]) -> None:
        self._meta = meta
        self._kv_layers = kv_layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kv = self._kv_layers[call.layer]
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))
        write_kv_cache(key, value, self._meta.slot_mapping, kv.keys, kv.values, scales=kv.scales)
        return paged_attention(
            query, kv.keys, kv.values, self._meta,
            scale=call.scale, sliding_window=call.sliding_window, soft_cap=call.soft_cap, scales=kv.scales,
        )  # fmt: skip


class AttentionProbe(PagedAttention):
    """Attention of one sequence that makes each layer's cache at its first call."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.caches: dict[int, KVLayer] = {}
        self._config = config
        super().__init__(one_sequence(NUM_TOKENS, NUM_TOKENS, device), self.caches)  # type: ignore[arg-type]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.caches:
            raise ValueError(f"layer {call.layer} attends twice")
        _check_call(call, _expected_window(self._config, call.layer))
        num_kv_heads, head_dim = call.key.shape[1], call.key.shape[3]
        shape = (1, NUM_TOKENS, num_kv_heads, head_dim)  # one block
        self.caches[call.layer] = KVLayer(call.key.new_zeros(shape), call.key.new_zeros(shape))
        return super().attend(call)


def _expected_window(config: Any, layer: int) -> int | None:
    """Return a layer's sliding window: 0 for none, None if `config` does not say."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return window if kinds[layer] == "sliding_attention" else 0
    if hasattr(config, "use_sliding_window"):
        return window if config.use_sliding_window else None
    return window


def _check_call(call: AttentionCall, window: int | None) -> None:
    others = [key for key, value in call.others.items() if key not in HARMLESS and value is not None]
    if others:
        raise ValueError(f"its attention takes {', '.join(sorted(others))}, which paged attention does not know")
    if call.mask is not None:
        raise ValueError("it makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    if call.key.shape != call.value.shape:
        raise ValueError("its values are not as wide as its keys")
    if window is not None and call.sliding_window != window:
        raise ValueError(f"layer {call.layer} has a window of {call.sliding_window}, its configuration says {window}")


class ProbeResult(NamedTuple):
    kv_shapes: list[tuple[int, int]]  # num_kv_heads, head_dim
    vocab_size: int  # width of the logits


def probe(model: Any, slot: AttentionSlot, name: str, device: torch.device) -> ProbeResult:
    """Raise `ConfigError` if paged attention gives other logits than transformers' own for a few tokens.

    This finds biases, sinks and masks that are no arguments.
    """
    inputs = {
        "input_ids": random_tokens(NUM_TOKENS, model.config.vocab_size, device).unsqueeze(0),
        "position_ids": torch.arange(NUM_TOKENS, device=device).unsqueeze(0),
        "use_cache": False,
    }
    probed = AttentionProbe(model.config, device)
    try:
        with slot.holding(probed):
            paged = model(**inputs).logits.float()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot run with paged attention: {one_line(error)}") from error
    if not probed.caches:
        raise ConfigError(f"{name} is not offered: {NO_INTERFACE}")
    layers = sorted(probed.caches)
    if layers != list(range(model.config.num_hidden_layers)):
        raise ConfigError(f"{name} is not offered: {len(layers)} of {model.config.num_hidden_layers} layers attend")
    model.set_attn_implementation("eager")
    difference = relative_difference(paged, model(**inputs).logits.float())
    model.set_attn_implementation(IMPLEMENTATION)
    limit = TOLERANCE[model.dtype]
    if not difference <= limit:
        raise ConfigError(
            f"{name} is not offered: paged attention changes its logits by {difference:.2g}, at most {limit} is right"
        )
    keys = [probed.caches[layer][0] for layer in layers]
    vocab_size, num_embeddings = paged.shape[-1], model.get_input_embeddings().weight.shape[0]
    if num_embeddings < vocab_size:
        raise ConfigError(
            f"{name} is not offered: it has logits of {vocab_size} tokens, embeddings of {num_embeddings}"
        )
    return ProbeResult([(key.shape[2], key.shape[3]) for key in keys], vocab_size)
