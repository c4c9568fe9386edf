from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tidewheel.batch import WeightVariant
from tidewheel.models.linear import FormatChoice, GroupFormat, Linear, Weights
from tidewheel.models.shard import Shard
from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.lora import LoraGroups

Progress = Callable[[str, float], None]  # stage, fraction in [0, 1]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVLayer(NamedTuple):
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor  # like keys
    scales: torch.Tensor | None = None  # [2, num_kv_heads] float32, for 8 bits


class ModelShape(NamedTuple):
    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # widest activation of a layer on this rank


class EncoderInput(NamedTuple):
    layers: Sequence[KVLayer]  # cross-attention keys and values
    meta: AttentionMetadata  # each token of the step is a sequence of its own, whose keys are an encoded input


class ForwardInput(NamedTuple):
    """Inputs of a step: T tokens, S of which give logits."""

    token_ids: torch.Tensor  # [T] int32 or int64
    positions: torch.Tensor  # [T] int64
    meta: AttentionMetadata
    kv_layers: Sequence[KVLayer]
    logit_indices: torch.Tensor  # [S] int64, ascending, unique
    encoder: EncoderInput | None = None  # of a decoder with cross-attention
    lora: LoraGroups | None = None  # tokens with adapters; None: none has one


class CausalLM(Protocol):
    shape: ModelShape
    weights_bytes: int
    is_capturable: bool  # `forward` never waits for the device

    def forward(self, step: ForwardInput) -> torch.Tensor:
        """Return logits [S, vocab_size], or this rank's part of them, in the model's dtype or float32."""

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and states of tokens `indices` [P] int64: normed hidden states, or logits [P, vocab]."""

    def logits_of(self, states: torch.Tensor) -> torch.Tensor: ...


class AttentionInput(NamedTuple):
    queries: torch.Tensor  # [T, num_q_heads, head_dim]
    residual: torch.Tensor  # [T, hidden_size]


class TokenLocations(NamedTuple):
    positions: torch.Tensor  # [T] int64, in the sequence
    slots: torch.Tensor  # [T] int64, in the cache; negative: padding
    lora: LoraGroups | None = None


def no_progress(stage: str, fraction: float) -> None:
    pass


class NativeModel(CausalLM):
    """Model of native layers. Its loader copies to `destinations`, fills layers `to_fill`, then calls `pack`."""

    is_capturable = True
    lm_head: Linear
    _unused = ""  # name of an output matrix that is tied

    def __init__(
        self, config: Any, *, max_model_len: int, dtype: torch.dtype, device: torch.device,
        deterministic: bool = False, format_of: FormatChoice = lambda _names: None, shard: Shard | None = None,
    ) -> None:  # fmt: skip
        weights = Weights(dtype, device, format_of, is_invariant=deterministic, shard=shard)
        self.config, self.max_model_len = config, max_model_len
        self.build(weights)
        self.destinations = weights.by_name
        self.shapes = weights.shapes()
        self.tensor_parts = weights.tensor_parts
        self.to_fill = [layer for layer in weights.linears if layer.format is not None]
        self.weights_bytes = sum(tensor.nbytes for tensor in self.destinations.values())
        self.weights_bytes += sum(layer.weight_bytes for layer in self.to_fill)
        self.variant: WeightVariant = "full"  # of the weights, in use
        self._linears = weights.linears
        self._copies: dict[Linear, GroupFormat] = {}
        self.copy_bytes = 0  # quantised copy, part of `weights_bytes`
        self.lora_bytes = 0  # of adapters' slots, part of `weights_bytes`

    def build(self, weights: Weights) -> None:
        """Make the layers, `shape` and `lm_head`."""
        raise NotImplementedError

    def ignores(self, name: str) -> bool:
        """Return whether a checkpoint tensor is unused."""
        return name == self._unused or name.endswith("rotary_emb.inv_freq")

    def plan_copies(self, form: GroupFormat) -> None:
        """Have `pack` make a copy of each matrix, of the output matrix in 8 bits. Raise `ConfigError`."""
        for layer in self._linears:
            copy = self._copies[layer] = GroupFormat(8) if layer is self.lm_head else form
            layer.check_size(copy, "pressure_quantization")
            self.copy_bytes += copy.num_bytes(layer.weight.numel())
        self.weights_bytes += self.copy_bytes

    def pack(self) -> None:
        """Arrange weights, all loaded, for computation."""
        self.destinations.clear()
        for layer in self._linears:
            if layer in self._copies:
                layer.add_copy(self._copies[layer])
            layer.pack()

    def use(self, weights: WeightVariant) -> None:
        """Compute with the quantised copy, or with full weights again."""
        self.variant = weights
        for layer in self._copies:
            layer.use_copy(weights == "quantized")

    def output_layer(self, weights: Weights, name: str, table: Linear, *, is_tied: bool) -> Linear:
        """Return the output matrix, `table` itself if it is tied and quantised."""
        if is_tied:
            self._unused = f"{name}.weight"
            return weights.layer(table.weight, None, None, {}, "vocabulary") if table.format is None else table
        return weights.linear("", self.shape.hidden_size, {name: self.shape.vocab_size}, split="vocabulary")
