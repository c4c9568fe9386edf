"""Architectures, and for each one whether it runs natively, through transformers, or not at all and why."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.errors import ConfigError
from tidewheel.models.config_file import Fields, architecture


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

_ALIBI = "its attention adds ALiBi position biases"
_RECURRENT = "it keeps a recurrent state instead of keys and values"
_LATENT = "its attention keeps a latent instead of keys and values (MLA)"
_SINKS = "its attention has sinks"
_ENCODER_DECODER = "it is a decoder with cross-attention to an encoder"
_BIDIRECTIONAL = "its attention is not causal"

REFUSED: dict[str, str] = {
    "BloomForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "MambaForCausalLM": _RECURRENT,
    "Mamba2ForCausalLM": _RECURRENT,
    "FalconMambaForCausalLM": _RECURRENT,
    "FalconH1ForCausalLM": _RECURRENT,
    "RwkvForCausalLM": _RECURRENT,
    "xLSTMForCausalLM": _RECURRENT,
    "RecurrentGemmaForCausalLM": _RECURRENT,
    "JambaForCausalLM": _RECURRENT,
    "BambaForCausalLM": _RECURRENT,
    "ZambaForCausalLM": _RECURRENT,
    "Zamba2ForCausalLM": _RECURRENT,
    "NemotronHForCausalLM": _RECURRENT,
    "Qwen3NextForCausalLM": _RECURRENT,
    "Lfm2ForCausalLM": _RECURRENT,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "GptOssForCausalLM": _SINKS,
    "T5ForConditionalGeneration": _ENCODER_DECODER,
    "BartForConditionalGeneration": _ENCODER_DECODER,
    "BartForCausalLM": _ENCODER_DECODER,
    "WhisperForConditionalGeneration": _ENCODER_DECODER,
    "BertLMHeadModel": _BIDIRECTIONAL,
    "RobertaForCausalLM": _BIDIRECTIONAL,
}


def native_traits(fields: Fields) -> NativeTraits | None:
    """Return native traits, or None for transformers. Raise `ConfigError` for a refused model."""
    name = architecture(fields)
    if name in REFUSED:
        raise ConfigError(f"{fields.where}: {name} is not offered: {REFUSED[name]}")
    for key in ("vision_config", "audio_config"):
        if fields.values.get(key):
            raise ConfigError(f"{fields.where}: {name} is multimodal ({key}); only text models are served")
    return NATIVE.get(name)
