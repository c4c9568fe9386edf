"""Whisper: an encoder of audio, and a decoder of text with cross-attention to it (Radford et al. 2022)."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import torch
from torch.nn.functional import conv1d, embedding, gelu, layer_norm, scaled_dot_product_attention

from tidewheel.audio_file import SAMPLES_PER_POSITION, SAMPLING_RATE
from tidewheel.errors import ConfigError
from tidewheel.models.architectures import MAX_HEAD_DIM, MAX_LAYERS
from tidewheel.models.causal_lm import ForwardInput, KVLayer, ModelShape, NativeModel
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.linear import Weights
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

WHISPER = "WhisperForConditionalGeneration"
POSITIONS_PER_SECOND = SAMPLING_RATE // SAMPLES_PER_POSITION
_EPS = 1e-5
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class WhisperConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, by the names of `config.json`."""

    vocab_size: Size
    d_model: Size
    num_mel_bins: Size
    encoder_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    encoder_attention_heads: Size
    encoder_ffn_dim: Size
    decoder_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    decoder_attention_heads: Size
    decoder_ffn_dim: Size
    max_source_positions: Annotated[Size, msgspec.Meta(multiple_of=POSITIONS_PER_SECOND)] = 1500
    context_length: Size = msgspec.field(default=448, name="max_target_positions")
    tie_word_embeddings: bool = True
    activation_function: Literal["gelu"] = "gelu"
    scale_embedding: bool = False


def parse_whisper(fields: ConfigFields) -> WhisperConfig:
    """Return the model's sizes. Raise `ConfigError`."""
    try:
        config = msgspec.convert({k: v for k, v in fields.values.items() if v is not None}, WhisperConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{fields.where}: {error}") from None
    for heads in (config.encoder_attention_heads, config.decoder_attention_heads):
        head_dim, rest = divmod(config.d_model, heads)
        if config.scale_embedding or rest or head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ConfigError(
                f"{fields.where}: scale_embedding must be false, and d_model {config.d_model} a multiple of {heads} "
                f"heads, of whose width a multiple of 8 up to {MAX_HEAD_DIM} is left"
            )
    return config


Affine = tuple[torch.Tensor, torch.Tensor]  # weight and bias


def affine(weights: Weights, name: str, *shape: int) -> Affine:
    return weights.tensor(name, *shape), weights.tensor(name, shape[0], part="bias")


def normed(x: torch.Tensor, norm: Affine) -> torch.Tensor:
    return layer_norm(x, norm[0].shape, *norm, _EPS)


class SelfAttention:
    def __init__(self, weights: Weights, prefix: str, hidden: int, num_heads: int) -> None:
        self._head_dim = hidden // num_heads
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        self.norm = affine(weights, f"{prefix}self_attn_layer_norm", hidden)
        self.qkv = weights.linear(f"{prefix}self_attn.", hidden, parts, bias=True, unbiased="k_proj")
        self.output = weights.linear(f"{prefix}self_attn.", hidden, {"out_proj": hidden}, bias=True)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [T, num_heads, head_dim] of `x` [T, hidden_size]."""
        return self.qkv(normed(x, self.norm)).view(len(x), 3, -1, self._head_dim).unbind(1)


class FeedForward:
    def __init__(self, weights: Weights, prefix: str, hidden: int, width: int) -> None:
        self._norm = affine(weights, f"{prefix}final_layer_norm", hidden)
        self._up = weights.linear(prefix, hidden, {"fc1": width}, bias=True)
        self._down = weights.linear(prefix, width, {"fc2": hidden}, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._down(gelu(self._up(normed(x, self._norm))))


class EncoderLayer:
    def __init__(self, config: WhisperConfig, weights: Weights, prefix: str) -> None:
        self._attention = SelfAttention(weights, prefix, config.d_model, config.encoder_attention_heads)
        self._mlp = FeedForward(weights, prefix, config.d_model, config.encoder_ffn_dim)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in self._attention.heads(x))
        attended = scaled_dot_product_attention(queries, keys, values).squeeze(0).transpose(0, 1)
        return self._mlp(x + self._attention.output(attended.reshape(x.shape)))


class AudioEncoder:
    def __init__(self, config: WhisperConfig, weights: Weights, prefix: str) -> None:
        hidden, sizes = config.d_model, (config.num_mel_bins, config.d_model)
        self._convolutions = [affine(weights, f"{prefix}conv{i}", hidden, size, 3) for i, size in enumerate(sizes, 1)]
        self._positions = weights.tensor(f"{prefix}embed_positions", config.max_source_positions, hidden)
        self._layers = [
            EncoderLayer(config, weights, f"{prefix}layers.{layer}.") for layer in range(config.encoder_layers)
        ]
        self._norm = affine(weights, f"{prefix}layer_norm", hidden)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return states [num_positions, hidden_size] of log-mel features [num_mel_bins, 2 * num_positions]."""
        x = features.to(self._positions.dtype).unsqueeze(0)
        for stride, (weight, bias) in enumerate(self._convolutions, 1):
            x = gelu(conv1d(x, weight, bias, stride, padding=1))
        x = x.squeeze(0).t() + self._positions
        for layer in self._layers:
            x = layer(x)
        return normed(x, self._norm)


class CrossAttention:
    def __init__(self, config: WhisperConfig, weights: Weights, prefix: str) -> None:
        hidden = config.d_model
        self._head_dim = hidden // config.decoder_attention_heads
        parts, name = {"k_proj": hidden, "v_proj": hidden}, f"{prefix}encoder_attn."
        self._norm = affine(weights, f"{prefix}encoder_attn_layer_norm", hidden)
        self._query = weights.linear(name, hidden, {"q_proj": hidden}, bias=True)
        self._key_value = weights.linear(name, hidden, parts, bias=True, unbiased="k_proj")
        self._output = weights.linear(name, hidden, {"out_proj": hidden}, bias=True)

    def write(self, states: torch.Tensor, slots: torch.Tensor, kv: KVLayer) -> None:
        keys, values = self._key_value(states).view(len(states), 2, -1, self._head_dim).unbind(1)
        write_kv_cache(keys, values, slots, kv.keys, kv.values)

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata, kv: KVLayer) -> torch.Tensor:
        queries = self._query(normed(x, self._norm)).view(len(x), -1, self._head_dim)
        attended = paged_attention(queries, kv.keys, kv.values, meta, scale=self._head_dim**-0.5)
        return x + self._output(attended.view(x.shape))


class TextLayer:
    def __init__(self, config: WhisperConfig, weights: Weights, prefix: str) -> None:
        self._scale = (config.d_model // config.decoder_attention_heads) ** -0.5
        self._attention = SelfAttention(weights, prefix, config.d_model, config.decoder_attention_heads)
        self.cross_attention = CrossAttention(config, weights, prefix)
        self.mlp = FeedForward(weights, prefix, config.d_model, config.decoder_ffn_dim)

    def attend(self, x: torch.Tensor, meta: AttentionMetadata, kv: KVLayer) -> torch.Tensor:
        queries, keys, values = self._attention.heads(x)
        write_kv_cache(keys, values, meta.slot_mapping, kv.keys, kv.values, scales=kv.scales)
        attended = paged_attention(queries, kv.keys, kv.values, meta, scale=self._scale, scales=kv.scales)
        return x + self._attention.output(attended.view(x.shape))


class Whisper(NativeModel):
    config: WhisperConfig
    is_capturable = False  # CUDA graphs only after a trial

    def build(self, weights: Weights) -> None:
        config, prefix = self.config, "model.decoder."
        hidden, heads = config.d_model, config.decoder_attention_heads
        self.shape = ModelShape(
            config.decoder_layers, heads, hidden // heads, config.vocab_size, hidden, config.decoder_ffn_dim
        )
        self._encoder = AudioEncoder(config, weights, "model.encoder.")
        self._embedding = weights.table(f"{prefix}embed_tokens", config.vocab_size, hidden)
        self._positions = weights.tensor(f"{prefix}embed_positions", config.context_length, hidden)
        self._layers = [
            TextLayer(config, weights, f"{prefix}layers.{layer}.") for layer in range(config.decoder_layers)
        ]
        self._norm = affine(weights, f"{prefix}layer_norm", hidden)
        self.lm_head = self.output_layer(weights, "proj_out", self._embedding, is_tied=config.tie_word_embeddings)

    @property
    def device(self) -> torch.device:
        return self._positions.device

    @property
    def encoder_activation_bytes(self) -> int:
        """Return an estimate for one audio: features, states, heads and the feed-forward part."""
        width = 2 * self.config.num_mel_bins + 8 * self.config.d_model + 2 * self.config.encoder_ffn_dim
        return self.config.max_source_positions * width * self._positions.itemsize

    def encode(self, features: torch.Tensor, slots: torch.Tensor, layers: Sequence[KVLayer]) -> None:
        """Write the cross-attention keys and values of an audio to `slots` [num_positions] int64."""
        states = self._encoder(features)
        for layer, kv in zip(self._layers, layers, strict=True):
            layer.cross_attention.write(states, slots, kv)

    def forward(self, step: ForwardInput) -> torch.Tensor:
        return self.logits_of(self._normed(self._run_layers(step), step.logit_indices))

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._run_layers(step)
        return self.logits_of(self._normed(x, step.logit_indices)), self._normed(x, indices)

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(states)

    def _run_layers(self, step: ForwardInput) -> torch.Tensor:
        x = self._embedding.rows(step.token_ids) + embedding(step.positions, self._positions)
        assert step.encoder is not None, "a runner of this model has an encoder cache"
        layers = zip(self._layers, step.kv_layers, step.encoder.layers, strict=True)
        for layer, kv, encoded in layers:
            x = layer.attend(x, step.meta, kv)
            x = layer.mlp(layer.cross_attention(x, step.encoder.meta, encoded))
        return x

    def _normed(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return normed(x.index_select(0, indices), self._norm)
