"""Architectures: native, through transformers, or refused and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.model_formats import config_refusal
from tidewheel.models.model_folder import ConfigFields, architecture

_ALIBI = "its attention adds ALiBi position biases"
_RECURRENT = "it keeps a recurrent state instead of keys and values"
_LATENT = "its attention keeps a latent instead of keys and values (MLA)"
_SINKS = "its attention has sinks"
_ENCODER_DECODER = "it is a decoder with cross-attention to an encoder"
_BIDIRECTIONAL = "its attention is not causal"
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
# Frequencies depend on the batch's longest sequence, so one request would change another.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTraits:
    """Traits of a native architecture that `config.json` does not state."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the configuration's `attention_bias`, for output too
    mlp_bias: bool = False  # read from `mlp_bias`
    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # default; None: num_attention_heads
    sliding_window: int | None = None  # default of `sliding_window`
    windowed_layers: str = "none"  # none, all, or chosen: by `use_sliding_window` and `layer_types`


NATIVE: dict[str, NativeTraits] = {
    "LlamaForCausalLM": NativeTraits(mlp_bias=True),
    "MistralForCausalLM": NativeTraits(qkv_bias=False, num_kv_heads=8, sliding_window=4096, windowed_layers="all"),
    "Qwen2ForCausalLM": NativeTraits(qkv_bias=True, sliding_window=4096, windowed_layers="chosen"),
    "Qwen3ForCausalLM": NativeTraits(qk_norm=True, head_dim=128, sliding_window=4096, windowed_layers="chosen"),
}

REFUSED: dict[str, tuple[str, ...]] = {  # by cause
    _ALIBI: ("BloomForCausalLM", "MptForCausalLM"),
    _RECURRENT: (
        "MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM", "RwkvForCausalLM",
        "xLSTMForCausalLM", "RecurrentGemmaForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "ZambaForCausalLM",
        "Zamba2ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM",
    ),
    _LATENT: ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    _SINKS: ("GptOssForCausalLM",),
    _ENCODER_DECODER: (
        "T5ForConditionalGeneration", "BartForConditionalGeneration", "BartForCausalLM",
        "WhisperForConditionalGeneration",
    ),
    _BIDIRECTIONAL: ("BertLMHeadModel", "RobertaForCausalLM"),
}  # fmt: skip


def native_traits(fields: ConfigFields) -> NativeTraits | None:
    """Return native traits, or None for transformers. Raise `ConfigError` for a refused model."""
    name = architecture(fields)
    for cause, names in REFUSED.items():
        if name in names:
            raise ConfigError(f"{fields.where}: {name} is not offered: {cause}")
    if refusal := config_refusal(fields.values):
        raise ConfigError(f"{fields.where}: {refusal}")
    return NATIVE.get(name)


def check_class(cls: Any, name: str) -> None:
    """Raise `ConfigError` if the class cannot run a packed sequence."""
    if getattr(cls, "_is_stateful", False):
        raise ConfigError(f"{name} is not offered: {_RECURRENT}")
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        raise ConfigError(f"{name} is not offered: it computes the logits of every token (no logits_to_keep)")


def check_config(config: Any, name: str) -> None:
    """Raise `ConfigError` if paged attention cannot honour the configuration."""
    for problem in _problems(config):
        raise ConfigError(f"{name} is not offered: {problem}")


def _problems(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield _ENCODER_DECODER
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        yield _ALIBI
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield _BIDIRECTIONAL
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
