"""Draft models that are decoders: a smaller model, or the first layers of the serving model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tidewheel.models.causal_lm import CausalLM, ForwardInput, KVLayer, ModelShape, Progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import ModelPlan, load_model, num_first_layers, plan_draft, refused_draft
from tidewheel.models.weight_source import WeightSource
from tidewheel.runner.drafter import DraftParts
from tidewheel.runner.eagle3 import Eagle3Source
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors, cache_layout


class DecoderDraft:
    shift = 0
    keeps_drafts = True

    def __init__(self, model: CausalLM, kv_layers: Sequence[KVLayer], num_tokens: int, *, has_cache: bool) -> None:
        self._model, self._num_tokens = model, num_tokens
        self.kv_layers, self.has_cache = kv_layers, has_cache
        self.vocab_size = model.shape.vocab_size

    def draft(self, step: ForwardInput, *, is_first: bool) -> torch.Tensor:  # noqa: ARG002
        return self._model.forward(step)[:, : self._num_tokens].argmax(dim=1)


class DecoderDraftParts(NamedTuple):
    model: CausalLM
    num_tokens: int  # vocabulary of the serving model
    layout: CacheLayout | None  # None: the model is the first layers of the serving one, and reads its cache

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def weights_bytes(self) -> int:
        return self.model.weights_bytes

    @property
    def block_bytes(self) -> int:
        return 0 if self.layout is None else self.layout.block_bytes

    def allocate(self, kv: KVTensors) -> DecoderDraft:
        if self.layout is None:
            layers = kv.layers[: self.model.shape.num_layers]
            return DecoderDraft(self.model, layers, self.num_tokens, has_cache=False)
        own = KVTensors(self.layout, len(kv.blocks), kv.device)
        return DecoderDraft(self.model, own.layers, self.num_tokens, has_cache=True)


class DraftSource(NamedTuple):
    """Draft model whose settings are checked, before weights are read."""

    num_bytes: int  # of its weights
    load: Callable[[CausalLM, int, Progress], DraftParts]  # of the serving model, loaded, and its block size


def find_draft_source(plan: ModelPlan, beside: int) -> DraftSource | None:
    """Return the model or layers that draft for the planned model, or None if neither is wanted.

    `beside`: bytes of the planned model's weights. Raise `ConfigError`.
    """
    if plan.config.speculation == "first_layers":
        return DraftSource(0, partial(_first_layers, num_first_layers(plan)))
    if plan.config.speculation == "eagle3":
        head = Eagle3Source.of(plan, beside)
        return DraftSource(head.num_bytes, head.load)
    if plan.config.speculation != "draft_model":
        return None
    draft = plan_draft(plan)
    with refused_draft(draft.folder):
        source = draft.open_source()
        return DraftSource(draft.check_fits(source, beside), partial(_draft_model, draft, source))


def _first_layers(count: int, model: CausalLM, _block_size: int, _progress: Progress) -> DraftParts:
    assert isinstance(model, Decoder), "others are refused"
    return DecoderDraftParts(model.first_layers(count), model.shape.vocab_size, None)


def _draft_model(
    plan: ModelPlan, source: WeightSource, model: CausalLM, block_size: int, progress: Progress
) -> DraftParts:
    with refused_draft(plan.folder):
        draft = load_model(plan, source, progress)
    return DecoderDraftParts(draft, model.shape.vocab_size, cache_layout(plan, draft, block_size))
