"""Native decoder of Llama, Mistral, Qwen2 and Qwen3."""

from collections.abc import Callable, Mapping
from copy import copy

import torch

from tidewheel.batch import WeightVariant
from tidewheel.models.architectures import ModelConfig, cos_sin_table
from tidewheel.models.causal_lm import AttentionInput, ForwardInput, KVLayer, ModelShape, NativeModel, TokenLocations
from tidewheel.models.linear import Linear, Weights
from tidewheel_kernels import AttentionMetadata, paged_attention, rms_norm, rope_and_cache, silu_and_mul
from tidewheel_kernels.decode_layers import DecodeLayers, HeadShape, LayerWeights, fits_decode_layers
from tidewheel_kernels.lora import LoraGroups, LoraSizes, lora_stack

StateTap = Callable[[torch.Tensor, torch.Tensor], None]  # of states [T, hidden_size] and their slots [T] int64


class Attention:
    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, prefix: str, cos_sin: torch.Tensor, in_features: int
    ) -> None:
        self._cos_sin, self.is_invariant = cos_sin, weights.is_invariant
        shard = weights.shard
        self._num_q_heads, self._num_kv_heads = shard.count(config.num_q_heads), shard.count(config.num_kv_heads)
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_windows[layer]
        q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        projections = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = weights.linear(
            prefix, in_features, projections, bias=config.qkv_bias, split="outputs", unit=config.head_dim
        )
        outputs = {"o_proj": config.hidden_size}
        self.output = weights.linear(prefix, q_width, outputs, bias=config.output_bias, split="inputs")
        self.q_norm = weights.tensor(f"{prefix}q_norm", config.head_dim) if config.qk_norm else None
        self.k_norm = weights.tensor(f"{prefix}k_norm", config.head_dim) if config.qk_norm else None

    def queries(self, x: torch.Tensor, places: TokenLocations, kv: KVLayer) -> torch.Tensor:
        heads = self.qkv(x, places.lora).view(x.shape[0], -1, self._head_dim)
        q, k, v = heads.split_with_sizes((self._num_q_heads, self._num_kv_heads, self._num_kv_heads), 1)
        rope_and_cache(
            q, k, v, self._cos_sin, places.positions, places.slots, kv.keys, kv.values,
            q_norm_weight=self.q_norm, k_norm_weight=self.k_norm, eps=self._eps, scales=kv.scales,
        )  # fmt: skip
        return q


class GatedMLP:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        projections = {"gate_proj": width, "up_proj": width}
        self.gate_up = weights.linear(prefix, hidden, projections, bias=bias, split="outputs")
        self.down = weights.linear(prefix, width, {"down_proj": hidden}, bias=bias, split="inputs")

    def __call__(self, x: torch.Tensor, lora: LoraGroups | None) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate_up(x, lora)), lora)


class DecoderLayer:
    """Layer in three parts, of which only attention depends on sequence lengths."""

    tap: StateTap | None = None  # takes the residual stream before the layer

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, cos_sin: torch.Tensor,
        prefix: str = "model.layers.{}.", num_inputs: int = 1,
    ) -> None:  # fmt: skip
        """`num_inputs`: vectors [hidden_size] that attention reads for each token."""
        prefix = prefix.format(layer)
        self._eps = config.rms_norm_eps
        self.input_norm = weights.tensor(f"{prefix}input_layernorm", config.hidden_size)
        in_features = num_inputs * config.hidden_size
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.", cos_sin, in_features)
        self.mlp_norm = weights.tensor(f"{prefix}post_attention_layernorm", config.hidden_size)
        self.mlp = GatedMLP(config, weights, f"{prefix}mlp.")
        self.linears = (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)

    def begin(
        self, x: torch.Tensor, residual: torch.Tensor | None, places: TokenLocations, kv: KVLayer
    ) -> AttentionInput:
        """Add `x` [T, hidden_size] to the residual, compute queries, and write keys and values."""
        normed, residual = add_norm(x, residual, self.input_norm, self._eps)
        if self.tap is not None:
            self.tap(residual, places.slots)
        return AttentionInput(self.attention.queries(normed, places, kv), residual)

    def attend(
        self, queries: torch.Tensor, meta: AttentionMetadata, kv: KVLayer, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [T, num_q_heads, head_dim], in `out` if given."""
        attention = self.attention
        return paged_attention(
            queries, kv.keys, kv.values, meta,
            scale=attention.scale, sliding_window=attention.sliding_window, scales=kv.scales, out=out,
            invariant=attention.is_invariant,
        )  # fmt: skip

    def end(
        self, attended: torch.Tensor, residual: torch.Tensor, lora: LoraGroups | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and residual, both [T, hidden_size]; the next norm adds them."""
        projected = self.attention.output(attended.view(attended.shape[0], -1), lora)
        normed, residual = add_norm(projected, residual, self.mlp_norm, self._eps)
        return self.mlp(normed, lora), residual

    def kernel_weights(self) -> LayerWeights | None:
        """Return the weights for `DecodeLayers`, None in other formats."""
        found = [weights for linear in self.linears if (weights := linear.kernel_weights()) is not None]
        if len(found) < len(self.linears):
            return None
        norms = self.input_norm, self.mlp_norm, self.attention.q_norm, self.attention.k_norm
        qkv, output, gate_up, down = found
        return LayerWeights(*norms, qkv, output, gate_up, down, self.attention.sliding_window)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    result = rms_norm(x, weight, eps, residual)
    return result if isinstance(result, tuple) else (result, x)


class Decoder(NativeModel):
    config: ModelConfig
    _first: "Decoder | None" = None  # layers that draft

    def build(self, weights: Weights) -> None:
        config, shard = self.config, weights.shard
        self.shape = ModelShape(
            config.num_layers, shard.count(config.num_kv_heads), config.head_dim, config.vocab_size,
            config.hidden_size, shard.count(config.intermediate_size),
        )  # fmt: skip
        # Otherwise a row that changes its logits would have the whole batch drawn from float32.
        self._logits_dtype = torch.float32 if weights.is_invariant else weights.dtype
        self.embedding = weights.table("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, self.max_model_len, weights.device)
        self.layers = [DecoderLayer(config, layer, weights, self._cos_sin) for layer in range(config.num_layers)]
        self.norm = weights.tensor("model.norm", config.hidden_size)
        self.lm_head = self.output_layer(weights, "lm_head", self.embedding, is_tied=config.tie_word_embeddings)
        self._decode_layers: dict[WeightVariant, DecodeLayers | None] = {}

    @property
    def lora_linears(self) -> list[Linear]:
        """Return the layers that adapters may change: the rows of the output matrix are not a step's tokens."""
        return [linear for layer in self.layers for linear in layer.linears]

    def add_lora_slots(self, max_loras: int, max_rank: int, device: torch.device) -> None:
        """Give each of `lora_linears` an empty stack of adapters' matrices."""
        for linear in self.lora_linears:
            sizes = LoraSizes(linear.in_features, tuple(linear.parts.values()), max_loras, max_rank)
            linear.lora = lora_stack(sizes, linear.weight.dtype, device)
            self.lora_bytes += linear.lora.num_bytes
        self.weights_bytes += self.lora_bytes

    def add_taps(self, taps: Mapping[int, StateTap]) -> None:
        """Call `taps` with the states before their layers, from now on without the C call of all layers."""
        for layer, tap in taps.items():
            self.layers[layer].tap = tap
        self._decode_layers.clear()

    def pack(self) -> None:
        """Arrange weights, all loaded, for computation, and bind those of decode steps of few rows."""
        super().pack()
        self._bind(self)

    def use(self, weights: WeightVariant) -> None:
        super().use(weights)
        if self._first is not None:
            self._first.variant = weights

    def first_layers(self, count: int) -> "Decoder":
        """Return the first layers with the output matrix as a decoder that shares the packed weights of this one."""
        self._first = first = copy(self)
        first.layers, first.shape, first.weights_bytes = self.layers[:count], self.shape._replace(num_layers=count), 0
        first._decode_layers = {}
        self._bind(first)
        return first

    def _bind(self, decoder: "Decoder") -> None:
        """Bind layers of `decoder`, this one or its first layers, once for each variant of the weights."""
        variants: tuple[WeightVariant, ...] = ("quantized", "full") if self._copies else ("full",)
        for weights in variants:
            self.use(weights)
            decoder._decode_layers[weights] = decoder._bound_layers()

    def _bound_layers(self) -> DecodeLayers | None:
        config = self.config
        heads = HeadShape(config.num_q_heads, config.num_kv_heads, config.head_dim)
        found = [weights for layer in self.layers if (weights := layer.kernel_weights()) is not None]
        if len(found) < len(self.layers) or not fits_decode_layers(found, heads):
            return None
        bound = DecodeLayers(found, heads, self._cos_sin, config.rms_norm_eps)
        if self.lora_linears[0].lora is not None:
            bound.use_lora([linear.lora for linear in self.lora_linears])
        return bound

    def forward(self, step: ForwardInput) -> torch.Tensor:
        return self.logits(*self._run_layers(step), step.logit_indices)

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._run_layers(step)
        sampled, states = (
            self._normed(x.index_select(0, chosen), residual.index_select(0, chosen))
            for chosen in (step.logit_indices, indices)
        )
        return self.logits_of(sampled), states

    def logits(self, x: torch.Tensor, residual: torch.Tensor, logit_indices: torch.Tensor) -> torch.Tensor:
        """Return logits as `forward` does, from the last layer's result."""
        if len(logit_indices) < len(x):
            x, residual = x.index_select(0, logit_indices), residual.index_select(0, logit_indices)
        return self.logits_of(self._normed(x, residual))

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(states).to(self._logits_dtype)

    def _run_layers(self, step: ForwardInput) -> tuple[torch.Tensor, torch.Tensor]:
        meta, lora = step.meta, step.lora
        x, places = self.embedding.rows(step.token_ids), TokenLocations(step.positions, meta.slot_mapping, lora)
        fused = self._decode_layers.get(self.variant)
        if fused is not None and lora is not None and not fused.takes_lora:
            fused = None
        if fused is not None and len(x) == meta.num_decodes <= fused.max_rows and step.kv_layers[0].scales is None:
            return x, fused.run(x, step.positions, meta, step.kv_layers, lora)
        residual: torch.Tensor | None = None
        for layer, kv in zip(self.layers, step.kv_layers, strict=True):
            cut = layer.begin(x, residual, places, kv)
            x, residual = layer.end(layer.attend(cut.queries, meta, kv), cut.residual, lora)
        assert residual is not None, "a decoder has at least one layer"
        return x, residual

    def _normed(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return add_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]
