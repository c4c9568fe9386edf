"""Models that draft tokens: another model, the first layers of the serving model, or an EAGLE-3 head of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import CausalLM, ForwardInput, KVLayer, Progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import ModelPlan, load_model, plan_model
from tidewheel.models.model_folder import read_config, resolve_folder
from tidewheel.models.weight_source import WeightSource
from tidewheel.regular_files import read_text
from tidewheel.runner.drafter import DraftModel
from tidewheel.runner.eagle3 import Eagle3Source
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors, cache_layout

FolderT = TypeVar("FolderT")

_REMEDY = "drafts are token ids, so take a model with the same tokenizer"


class DecoderDraft:
    """Decoder that drafts: the first layers of the serving model, whose cache they read, or one with a `layout`."""

    shift, keeps_drafts = 0, True
    kv_layers: Sequence[KVLayer]

    def __init__(self, model: CausalLM, num_tokens: int, layout: CacheLayout | None = None) -> None:
        """`num_tokens`: vocabulary of the serving model."""
        self._model, self._num_tokens, self._layout = model, num_tokens, layout
        self.shape, self.vocab_size, self.weights_bytes = model.shape, model.shape.vocab_size, model.weights_bytes
        self.block_bytes = 0 if layout is None else layout.block_bytes

    def allocate(self, kv: KVTensors) -> None:
        own = kv if self._layout is None else KVTensors(self._layout, len(kv.blocks), kv.device)
        self.kv_layers = own.layers[: self.shape.num_layers]

    def draft(self, step: ForwardInput, *, is_first: bool) -> torch.Tensor:  # noqa: ARG002
        return self._model.forward(step)[:, : self._num_tokens].argmax(dim=1)


class DraftSource(NamedTuple):
    """Draft model whose settings are checked, before weights are read."""

    num_bytes: int  # of its weights
    load: Callable[[CausalLM, int, Progress], DraftModel]  # of the serving model, loaded, and its block size


def find_draft_source(plan: ModelPlan, beside: int) -> DraftSource | None:
    """Return the model or layers that draft for the planned model, or None if neither is wanted.

    `beside`: bytes of the planned model's weights. Raise `ConfigError`.
    """
    config, native = plan.config, plan.native
    if config.speculation in ("none", "prompt_lookup"):
        return None
    if config.speculation == "draft_model":
        draft = plan_draft(plan)
        with refused_draft(draft.folder):
            source = draft.open_source()
            return DraftSource(draft.check_fits(source, beside), partial(_load_draft, draft, source))
    if not isinstance(native, Decoder):
        raise ConfigError(
            f"speculation is {config.speculation}: {plan.architecture} does not run on the native decoder, whose "
            "layers or states it needs; set it to draft_model or prompt_lookup"
        )
    if config.speculation == "eagle3":
        folder = find_draft(config, resolve_folder)
        with refused_draft(folder):
            head = Eagle3Source.of(plan, native.config, folder, beside)
        return DraftSource(head.num_bytes, head.load)
    wanted, total = config.num_draft_layers, native.shape.num_layers
    if wanted is not None and wanted > total:
        raise ConfigError(f"num_draft_layers is {wanted}: the model has {total} layers; set it to at most {total}")
    return DraftSource(0, partial(_first_layers, wanted or max(total // 4, 1)))


def plan_draft(plan: ModelPlan) -> ModelPlan:
    """Return the plan of `draft_model`, in the formats that are set for the model. Raise `ConfigError`."""
    config = plan.config
    folder = find_draft(config, resolve_folder)
    check_tokens(folder, Path(config.tokenizer or plan.folder), plan.vocab_size)
    shared = ("dtype", "quantization", "kv_cache_dtype", "deterministic", "load_format", "seed")
    own = EngineConfig(model=str(folder), **{name: getattr(config, name) for name in shared})
    with refused_draft(folder):
        draft = plan_model(folder, read_config(folder), own, plan.device)
        if not isinstance(draft.native, Decoder):
            raise ConfigError(f"{draft.architecture} does not run on the native decoder, which drafts: take another")
        if draft.max_model_len < plan.max_model_len:
            raise ConfigError(
                f"it was made for at most {draft.max_model_len} tokens, and max_model_len is {plan.max_model_len}: "
                f"set that to at most {draft.max_model_len}"
            )
    return draft._replace(max_model_len=plan.max_model_len)


def find_draft(config: EngineConfig, find: Callable[[str, str, str], FolderT]) -> FolderT:
    """Return the folder of the setting `draft_model` that `find` finds. Raise `ConfigError`."""
    try:
        return find(config.draft_model, "", config.download_dir)
    except ConfigError as error:
        raise ConfigError(f"draft_model cannot be found: {error}") from None


@contextmanager
def refused_draft(folder: Path) -> Iterator[None]:
    """Name `draft_model` in errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"draft_model is {folder}: {error}") from None


def check_tokens(draft: Path, tokenizer: Path, vocab_size: int) -> None:
    """Raise `ConfigError` if a token id of a draft model may mean another text to the model that it drafts for.

    `tokenizer`, `vocab_size`: folder with the model's `tokenizer.json`, and size of its vocabulary. That of the draft
    may be smaller, as the models of a family may pad it differently.
    """
    drafted = read_config(draft).integer("vocab_size")
    if drafted > vocab_size:
        raise ConfigError(f"draft_model is {draft}, of vocab_size {drafted}; the model has {vocab_size}: {_REMEDY}")
    theirs, ours = _ids(draft), _ids(tokenizer)
    wrong = [(token_id, token) for token, token_id in theirs.items() if ours.get(token) != token_id < drafted]
    if wrong:
        token_id, token = min(wrong)
        other = f"is {ours[token]} in the model's" if token in ours else "is not in the model's"
        raise ConfigError(
            f"draft_model is {draft}, in whose tokenizer.json {token[:40]!r} is {token_id}; it {other}: {_REMEDY}"
        )


def _ids(folder: Path) -> dict[str, int]:
    """Return a tokenizer's ids by token. Raise `ConfigError`."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_str(read_text(path) or "").get_vocab()
    except Exception as error:  # tokenizers has no class of its own
        raise ConfigError(f"{path} has no tokens that draft_model could be compared with: {error}") from None


def _first_layers(count: int, model: CausalLM, _block_size: int, _progress: Progress) -> DraftModel:
    assert isinstance(model, Decoder), "others are refused"
    return DecoderDraft(model.first_layers(count), model.shape.vocab_size)


def _load_draft(
    plan: ModelPlan, source: WeightSource, model: CausalLM, block_size: int, progress: Progress
) -> DraftModel:
    with refused_draft(plan.folder):
        draft = load_model(plan, source, progress)
    return DecoderDraft(draft, model.shape.vocab_size, cache_layout(plan, draft, block_size))
