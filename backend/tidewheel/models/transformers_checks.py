"""Checks of a transformers model's class and configuration before it is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from tidewheel.errors import ConfigError

LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
# Frequencies depend on the batch's longest sequence, so one request would change another.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_class(cls: Any, name: str) -> None:
    """Raise `ConfigError` for a class that cannot run as one packed sequence."""
    if getattr(cls, "_is_stateful", False):
        raise ConfigError(f"{name} is not offered: it keeps a recurrent state instead of keys and values")
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        raise ConfigError(f"{name} is not offered: it computes the logits of every token (no logits_to_keep)")


def check_config(config: Any, name: str) -> None:
    """Raise `ConfigError` with the first property that paged attention cannot honour."""
    for problem in _problems(config):
        raise ConfigError(f"{name} is not offered: {problem}")


def _problems(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "it is a decoder with cross-attention to an encoder"
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        yield "its attention adds ALiBi position biases"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "its attention is not causal"
    if getattr(config, "attention_chunk_size", None):
        yield f"its attention works in chunks (attention_chunk_size {config.attention_chunk_size})"
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            yield f"it has layers of type {kind}"
    for rope_type in _rope_types(config):
        if rope_type in BATCH_DEPENDENT_ROPE:
            yield f"rope_type {rope_type} depends on the longest sequence of the batch"


def _rope_types(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        for section in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
            yield str(section.get("rope_type", "default"))


def expected_window(config: Any, layer: int) -> int | None:
    """Return a layer's sliding window: 0 for none, None if `config` does not say."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return window if kinds[layer] == "sliding_attention" else 0
    if hasattr(config, "use_sliding_window"):
        return window if config.use_sliding_window else None
    return window
