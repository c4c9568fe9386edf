import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import MAX_CONTEXT, ConfigFields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    rope_type: str
    theta: float
    factor: float = 1.0
    original_context: int = 0  # before scaling; llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # factor of cosines and sines
    truncate: bool = True


def parse_rope(fields: ConfigFields) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    merged = ConfigFields(
        {**fields.section("rope_scaling").values, **fields.section("rope_parameters").values},
        f"{fields.where}: rope parameters",
    )
    rope_type = merged.text("rope_type", merged.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"{merged.where}: rope_type {rope_type!r} is not offered; known: {', '.join(ROPE_TYPES)}")
    if merged.number("partial_rotary_factor", 1.0) != 1.0 or fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{merged.where}: partial_rotary_factor is not offered for this architecture")
    theta = merged.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if theta <= 1.0:
        raise ConfigError(f"{merged.where}: rope_theta is {theta:g}, it must be above 1")
    rope = RopeConfig(rope_type=rope_type, theta=theta)
    return rope if rope_type == "default" else _with_scaling(rope, fields, merged)


def _with_scaling(rope: RopeConfig, fields: ConfigFields, merged: ConfigFields) -> RopeConfig:
    if rope.rope_type == "linear":
        return replace(rope, factor=merged.number("factor"))
    context = fields.integer("max_position_embeddings")
    original = merged.integer("original_max_position_embeddings", context)
    if rope.rope_type == "llama3":
        low, high = merged.number("low_freq_factor"), merged.number("high_freq_factor")
        if high <= low:
            raise ConfigError(f"{merged.where}: high_freq_factor {high} must be above low_freq_factor {low}")
        factor = merged.number("factor")
        return replace(rope, factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high)
    if merged.values.get("mscale_all_dim") and merged.values.get("attention_factor") is None:
        raise merged.error("mscale_all_dim", "replaced by the attention_factor that it gives")
    factor = merged.number("factor", context / original)
    return replace(
        rope, factor=factor, original_context=original,
        beta_fast=merged.number("beta_fast", 32.0), beta_slow=merged.number("beta_slow", 1.0),
        attention_factor=merged.number("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),  # section 3.4
        truncate=merged.flag("truncate", True),
    )  # fmt: skip


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2] float32, in radians per position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    return _yarn(plain, rope, rotary_dim) if rope.rope_type == "yarn" else plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow down long waves, keep short ones, and blend between (`apply_scaling` of Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_context / wavelength - low) / (high - low)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Blend interpolated and plain frequencies (YaRN, Peng et al. 2023, section 3.2, "NTK-by-parts")."""

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of 0 / 0
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def cos_sin_table(rope: RopeConfig, rotary_dim: int, length: int, device: torch.device) -> torch.Tensor:
    """Return [length, rotary_dim] float32: cosines, then sines."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, rotary_dim))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


_ALIBI = "its attention adds ALiBi position biases"
_RECURRENT = "it keeps a recurrent state instead of keys and values"
_LATENT = "its attention keeps a latent instead of keys and values (MLA)"
_SINKS = "its attention has sinks"
_ENCODER_DECODER = "it is a decoder with cross-attention to an encoder"
_BIDIRECTIONAL = "its attention is not causal"
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTraits:
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: `attention_bias`, for output too
    mlp_bias: bool = False  # read from `mlp_bias`
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: num_attention_heads
    sliding_window: int | None = None  # default
    windowed_layers: str = "none"  # none, all, or chosen by the configuration


NATIVE: dict[str, NativeTraits] = {
    "LlamaForCausalLM": NativeTraits(mlp_bias=True),
    "MistralForCausalLM": NativeTraits(qkv_bias=False, num_kv_heads=8, sliding_window=4096, windowed_layers="all"),
    "Qwen2ForCausalLM": NativeTraits(qkv_bias=True, sliding_window=4096, windowed_layers="chosen"),
    "Qwen3ForCausalLM": NativeTraits(qk_norm=True, head_dim=128, sliding_window=4096, windowed_layers="chosen"),
}

REFUSED: dict[str, tuple[str, ...]] = {
    _ALIBI: ("BloomForCausalLM", "MptForCausalLM"),
    _RECURRENT: (
        "MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM", "RwkvForCausalLM",
        "xLSTMForCausalLM", "RecurrentGemmaForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "ZambaForCausalLM",
        "Zamba2ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM",
    ),
    _LATENT: ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    _SINKS: ("GptOssForCausalLM",),
    _ENCODER_DECODER: ("T5ForConditionalGeneration", "BartForConditionalGeneration", "BartForCausalLM"),
    _BIDIRECTIONAL: ("BertLMHeadModel", "RobertaForCausalLM"),
}  # fmt: skip


def native_traits(fields: ConfigFields) -> NativeTraits | None:
    """Return a native architecture's traits, None for others. Raise `ConfigError` if refused."""
    name = fields.architecture
    for cause, names in REFUSED.items():
        if name in names:
            raise ConfigError(f"{fields.where}: {name} is not offered: {cause}")
    return NATIVE.get(name)


def not_offered(name: str, cause: str) -> ConfigError:
    return ConfigError(f"{name} is not offered: {cause}")


def check_offered(cls: Any, config: Any) -> None:
    """Raise `ConfigError` for a class of transformers with this configuration."""
    if getattr(cls, "_is_stateful", False):
        raise not_offered(cls.__name__, _RECURRENT)
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        raise not_offered(cls.__name__, "it computes the logits of every token (no logits_to_keep)")
    for problem in _problems(config):
        raise not_offered(cls.__name__, problem)


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
    rope = getattr(config, "rope_parameters", None)
    for section in (rope, *rope.values()) if isinstance(rope, dict) else ():  # some have one for each type of layer
        if isinstance(section, dict) and section.get("rope_type") in BATCH_DEPENDENT_ROPE:
            yield f"rope_type {section['rope_type']} depends on the longest sequence of the batch"


MAX_LAYERS = 1024
MAX_HEAD_DIM = 256
ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a pre-norm decoder: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm over each head, before rotation
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int, ...]  # [num_layers] 0 = full attention

    @property
    def context_length(self) -> int:
        scaled = self.rope.original_context * self.rope.factor if self.rope.rope_type == "yarn" else 0
        return max(self.max_position_embeddings, int(min(scaled, MAX_CONTEXT)))


def parse_config(fields: ConfigFields, traits: NativeTraits) -> ModelConfig:
    """Return the decoder's sizes. Raise `ConfigError`."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{fields.where}: hidden_act {activation!r} is not offered here, only silu")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_q_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", False) if traits.qkv_bias is None else False
    config = ModelConfig(
        architecture=fields.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=fields.integer("num_key_value_heads", traits.num_kv_heads or num_q_heads),
        head_dim=fields.integer("head_dim", traits.head_dim or hidden_size // num_q_heads, high=MAX_HEAD_DIM),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", high=MAX_CONTEXT),
        rope=parse_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=traits.qk_norm,
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if traits.mlp_bias else False,
        sliding_windows=_sliding_windows(fields, traits, num_layers),
    )
    if config.num_q_heads % config.num_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {config.num_q_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 8:
        raise ConfigError(f"{fields.where}: head_dim is {config.head_dim}, it must be a multiple of 8")
    return config


def check_num_ranks(config: ModelConfig, num_ranks: int) -> None:
    """Raise `ConfigError` if so many ranks cannot hold equal parts of the model."""
    if objection := _objection_to_ranks(config, num_ranks):
        fitting = " or ".join(map(str, possible_num_ranks(config)))
        raise ConfigError(f"tensor_parallel_size is {num_ranks}: {objection}; set it to {fitting}")


def possible_num_ranks(config: ModelConfig) -> list[int]:
    return [number for number in range(1, config.num_q_heads + 1) if not _objection_to_ranks(config, number)]


def _objection_to_ranks(config: ModelConfig, num_ranks: int) -> str:
    counts = {
        "num_attention_heads": config.num_q_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    for name, count in counts.items():
        if count % num_ranks:
            return f"the model's {name} is {count}, no multiple of it"
    if config.num_kv_heads % num_ranks and num_ranks % config.num_kv_heads:
        return f"the model's num_key_value_heads is {config.num_kv_heads}, neither a multiple nor a factor of it"
    return ""


def _sliding_windows(fields: ConfigFields, traits: NativeTraits, num_layers: int) -> tuple[int, ...]:
    full = (0,) * num_layers
    if traits.windowed_layers == "none":
        return full
    # Null disables the window; without the key, the default holds.
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields.values else traits.sliding_window
    if traits.windowed_layers == "all":
        return full if window is None else (window,) * num_layers
    if window is None or not fields.flag("use_sliding_window", False):
        return full
    return tuple(window if kind == "sliding_attention" else 0 for kind in _layer_types(fields, num_layers))


def _layer_types(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    if fields.values.get("layer_types") is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", f"{num_layers} of sliding_attention or full_attention")
    return kinds
