"""Shape of a native decoder, from whitelisted keys of `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NativeTraits
from tidewheel.models.model_folder import MAX_CONTEXT, ConfigFields, architecture
from tidewheel.models.rope_table import RopeConfig, parse_rope

MAX_LAYERS = 1024
MAX_HEAD_DIM = 256
ACTIVATIONS = ("silu", "swish")  # names of one function


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Decoder of pre-norm blocks: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward."""

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
    qk_norm: bool = False  # RMSNorm over each head of q and k before rotation
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int, ...]  # [num_layers] 0 = full attention

    @property
    def context_length(self) -> int:
        return max(self.max_position_embeddings, self.rope.extended_context)


def parse_config(fields: ConfigFields, traits: NativeTraits) -> ModelConfig:
    """Raise `ConfigError` with the key, its value and what is accepted."""
    _check_activation(fields)
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_q_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", False) if traits.qkv_bias is None else False
    config = ModelConfig(
        architecture=architecture(fields),
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
    _check_heads(fields, config)
    return config


def _check_activation(fields: ConfigFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{fields.where}: hidden_act {activation!r} is not offered here, only silu")


def _check_heads(fields: ConfigFields, config: ModelConfig) -> None:
    if config.num_q_heads % config.num_kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads {config.num_q_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 8:
        raise ConfigError(f"{fields.where}: head_dim is {config.head_dim}, it must be a multiple of 8")


def _sliding_windows(fields: ConfigFields, traits: NativeTraits, num_layers: int) -> tuple[int, ...]:
    full = (0,) * num_layers
    if traits.windowed_layers == "none":
        return full
    # An explicit null disables the window; an absent key means the architecture's default.
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
