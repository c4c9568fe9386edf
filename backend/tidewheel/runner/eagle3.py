"""EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts from states of its target.

The head pairs the target's state at position i with the token at i + 1, and drafts the token at i + 2. For a draft,
whose state is unknown, its own last output takes the place. Target steps leave each token's state in the slot of its
keys and values. Blocks that were copied or swapped have states of other tokens: drafts get worse, answers do not.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NATIVE, ModelConfig, cos_sin_table, parse_config
from tidewheel.models.causal_lm import AttentionInput, CausalLM, ForwardInput, KVLayer, ModelShape, TokenLocations
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.decoder import Decoder, DecoderLayer, add_norm
from tidewheel.models.linear import Weights
from tidewheel.models.loader import ModelPlan, check_weights_fit
from tidewheel.models.model_folder import read_config
from tidewheel.models.weight_source import SafetensorsFolder, check_names, uncounted
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors, empty_slots

ARCHITECTURE, NUM_STATES = "LlamaForCausalLMEagle3", 3
TABLE, OFFSETS, INVERSE = "embed_tokens.weight", "d2t", "t2d"


class Eagle3Source(NamedTuple):
    """Checked folder of a head, before its weights are read."""

    sizes: ModelConfig  # `vocab_size` is the target's
    target_layers: tuple[int, ...]  # [NUM_STATES] the head reads the states before them
    target_ids: torch.Tensor  # [draft_vocab_size] int64
    tensors: SafetensorsFolder
    dtype: torch.dtype
    num_bytes: int = 0  # of the weights
    token_bytes: int = 0  # of keys, values and states of a token

    @classmethod
    def of(cls, plan: ModelPlan, target: ModelConfig, folder: Path, beside: int | None) -> "Eagle3Source":
        """Return the head in a folder; `plan`, `beside`: of the target; None bytes: any fit. Raise `ConfigError`."""
        fields, tensors = read_config(folder), SafetensorsFolder(folder)
        sizes, target_layers = _parse(fields, target)
        found = cls(sizes, target_layers, _target_ids(fields, tensors, sizes.vocab_size), tensors, plan.dtype)
        empty = Eagle3Head(found, max_model_len=1, device=torch.device("meta"))
        check_names(tensors, empty.shapes, (OFFSETS, INVERSE).__contains__, folder)
        if beside is not None:
            num_bytes = beside + empty.weights_bytes
            check_weights_fit(num_bytes, plan.dtype, plan.device, name="its weights and the model's")
        token_bytes = CacheLayout(empty.shape, 1, plan.dtype).block_bytes + sizes.hidden_size * plan.dtype.itemsize
        return found._replace(num_bytes=empty.weights_bytes, token_bytes=token_bytes)

    def load(self, model: CausalLM, block_size: int, _progress: object) -> "Eagle3Head":
        """Load the weights. `model`: the target, loaded. Raise `ConfigError`."""
        assert isinstance(model, Decoder), "others are refused"
        head = Eagle3Head(self, max_model_len=model.max_model_len, device=model.norm.device)
        head.load(self, model, block_size)
        return head


def _parse(fields: ConfigFields, target: ModelConfig) -> tuple[ModelConfig, tuple[int, ...]]:
    """Return the head's sizes, and the target's layers before which it reads states. Raise `ConfigError`."""
    if (name := fields.architecture) != ARCHITECTURE:
        raise ConfigError(f"{name} is no EAGLE-3 head ({ARCHITECTURE})")
    for option in ("norm_before_residual", "norm_output"):  # others have tensors of their own
        if fields.flag(option, False):
            raise ConfigError(f"{fields.where}: {option} is not offered: take a head that was trained without it")
    sizes = parse_config(fields, NATIVE["LlamaForCausalLM"])
    if sizes.num_layers != 1:
        raise fields.error("num_hidden_layers", "1")
    for size in ("hidden_size", "vocab_size"):
        if getattr(sizes, size) != getattr(target, size):
            raise fields.error(size, f"that of its target, {getattr(target, size)}")
    key, offset = "eagle_aux_hidden_state_layer_ids", 0
    if key not in fields.values:
        fields, offset = fields.section("eagle_config"), 1  # SGLang's heads name the layers after which states come
    ids = fields.values.get(key, [1, target.num_layers // 2 - 1, target.num_layers - 4])
    layers = [index + offset for index in ids if isinstance(index, int)] if isinstance(ids, list) else []
    if len(layers) != NUM_STATES or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= target.num_layers:
        raise fields.error(key, f"{NUM_STATES} ascending layers of {target.num_layers}")
    return sizes, tuple(layers)


def _target_ids(fields: ConfigFields, tensors: SafetensorsFolder, vocab_size: int) -> torch.Tensor:
    """Return the target's token id [draft_vocab_size] int64 of each draft id. Raise `ConfigError`."""
    size = fields.integer("draft_vocab_size", vocab_size, high=vocab_size)
    ids, stored = torch.arange(size), tensors.tensors.get(OFFSETS)
    if stored is not None:
        if stored.shape != (size,) or stored.kind != torch.int64:
            raise ConfigError(f"{OFFSETS} is {stored.kind} {list(stored.shape)}, it must be int64 [{size}]")
        ids += tensors.plain(OFFSETS, ids.device)
    elif size < vocab_size:
        raise ConfigError(f"it has no {OFFSETS}, which tells the tokens of {size} of {vocab_size} ids")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ConfigError(f"{OFFSETS} leads to tokens outside the vocabulary of {vocab_size}")
    return ids


class Eagle3Layer(DecoderLayer):
    """Layer whose attention reads normed embeddings beside normed states, which are its residual."""

    def __init__(self, config: ModelConfig, weights: Weights, cos_sin: torch.Tensor) -> None:
        super().__init__(config, 0, weights, cos_sin, prefix="midlayer.", num_inputs=2)
        self._state_norm = weights.tensor("midlayer.hidden_norm", config.hidden_size)

    def begin(
        self, x: torch.Tensor, residual: torch.Tensor | None, places: TokenLocations, kv: KVLayer
    ) -> AttentionInput:
        assert residual is not None
        pairs = ((x, self.input_norm), (residual, self._state_norm))
        normed = torch.cat([add_norm(each, None, weight, self._eps)[0] for each, weight in pairs], dim=1)
        return AttentionInput(self.attention.queries(normed, places, kv), residual)


class Eagle3Head:
    """Head with room for states, keys and values in the blocks of its target."""

    shift, keeps_drafts = 1, False  # drafts have keys of the head's own outputs
    kv_layers: Sequence[KVLayer]

    def __init__(self, source: Eagle3Source, *, max_model_len: int, device: torch.device) -> None:
        weights, sizes = Weights(source.dtype, device, lambda _names: None), source.sizes
        hidden, num_drafted, self.vocab_size = sizes.hidden_size, len(source.target_ids), sizes.vocab_size
        self.shape = ModelShape(1, sizes.num_kv_heads, sizes.head_dim, num_drafted, hidden, sizes.intermediate_size)
        self._eps, self._target_ids = sizes.rms_norm_eps, source.target_ids
        has_table = TABLE in source.tensors.tensors
        self._table = weights.table("embed_tokens", sizes.vocab_size, hidden) if has_table else None
        weights.tensor("fc", hidden, NUM_STATES * hidden)
        self._layer = Eagle3Layer(sizes, weights, cos_sin_table(sizes.rope, sizes.head_dim, max_model_len, device))
        self._norm = weights.tensor("norm", hidden)
        self._lm_head = weights.linear("", hidden, {"lm_head": num_drafted})
        self._weights, self.shapes = weights, weights.shapes()
        self.weights_bytes = sum(tensor.nbytes for tensor in weights.by_name.values())

    def load(self, source: Eagle3Source, target: Decoder, block_size: int) -> None:
        """Load the weights; those of embeddings that the head lacks are the target's."""
        weights = self._weights
        source.tensors.copy(weights.by_name, uncounted)
        parts = weights.by_name["fc.weight"].chunk(NUM_STATES, dim=1)
        self._joins = [weights.layer(part.contiguous(), None, None, {}) for part in parts]
        weights.by_name.clear()
        for linear in weights.linears:
            linear.pack()
        self._table = self._table or target.embedding
        self._target_ids = self._target_ids.to(self._norm.device)
        self._layout = CacheLayout(self.shape, block_size, source.dtype)
        self.block_bytes = block_size * source.token_bytes
        taps = {layer: partial(self._tap, index) for index, layer in enumerate(source.target_layers)}
        self._follow = partial(target.add_taps, taps)

    def allocate(self, kv: KVTensors) -> None:
        self.kv_layers = KVTensors(self._layout, len(kv.blocks), kv.device).layers
        size = (len(kv.blocks) * self._layout.block_size + 1, self.shape.hidden_size)  # the last row is for padding
        self._states = empty_slots(size, self._layout.dtype, kv.device)
        self._outputs = self._states[:0]  # [S, hidden_size] of the last step
        self._follow()

    def _tap(self, index: int, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Add the product of the states [T, hidden_size] before a layer to what the slots hold of earlier ones.

        Nothing is kept from one tap to the next, between which a graph may end.
        """
        slots, joined = slots.remainder(len(self._states)), self._joins[index](states)
        if index:
            joined += self._states.index_select(0, slots)
        self._states.index_copy_(0, slots, joined)

    def draft(self, step: ForwardInput, *, is_first: bool) -> torch.Tensor:
        """Return the drafts [S] int64 at `step.logit_indices`; each token is the one after its position."""
        assert self._table is not None, "loaded"
        (kv,), meta = self.kv_layers, step.meta
        states = self._states.index_select(0, meta.slot_mapping) if is_first else self._outputs[: len(step.token_ids)]
        places = TokenLocations(step.positions, meta.slot_mapping)
        cut = self._layer.begin(self._table.rows(step.token_ids), states, places, kv)
        x, residual = self._layer.end(self._layer.attend(cut.queries, meta, kv), cut.residual, None)
        x, residual = x.index_select(0, step.logit_indices), residual.index_select(0, step.logit_indices)
        normed, self._outputs = add_norm(x, residual, self._norm, self._eps)
        return self._target_ids.index_select(0, self._lm_head(normed).argmax(dim=1))
