"""Tokens that a model drafts on the device, before the step's forward pass verifies them, and models that draft.

A draft model reads prompts after the serving model while drafts are in use, and computes what else it lacks of a
row's tokens when the row wants drafts. Its keys and values lie in the blocks of the serving model, where a slot
counts as cached until the serving model computes another token there. So rows that share blocks share the work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from tidewheel.batch import TO_DRAFT, BoolArray, Int32Array, Int64Array, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import CausalLM, ForwardInput, KVLayer, ModelShape, Progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import ModelPlan, load_model, plan_model
from tidewheel.models.model_folder import read_config, resolve_folder
from tidewheel.models.weight_source import WeightSource
from tidewheel.regular_files import read_text
from tidewheel.runner.eagle3 import Eagle3Source
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.inputs import ForwardBounds, Group, HostInputs, InputSender, RowTable, StepInputs
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors, cache_layout

# Chunks of at most so many tokens in all are computed as decodes: on a CPU in one call of all layers.
MOST_AS_DECODES = 16
# Tokens of a step, of rows that lack more than `MOST_AS_DECODES`: all rows wait for them.
MOST_CAUGHT_UP = {"cpu": MOST_AS_DECODES, "cuda": 2048}
IDLE_STEPS = 256  # without drafts, after which prompts are not read

FolderT = TypeVar("FolderT")
_REMEDY = "drafts are token ids, so take a model with the same tokenizer"


class DraftModel(Protocol):
    """Loaded model that drafts, with keys and values in the blocks of the serving model."""

    shape: ModelShape
    weights_bytes: int  # beside the serving model's
    block_bytes: int  # of its own cache, for a block; 0: it reads the serving model's
    kv_layers: Sequence[KVLayer]  # after `allocate`
    vocab_size: int  # of its inputs
    shift: int  # position i reads token i + shift
    keeps_drafts: bool  # keys and values of accepted drafts stay right

    def allocate(self, kv: KVTensors) -> None:
        """Make room for all blocks of `kv`, the serving model's cache, instead of the room so far."""

    def draft(self, step: ForwardInput, *, is_first: bool) -> torch.Tensor:
        """Return the next token [S] int64 after each logit index, in the serving model's vocabulary.

        Each later call drafts one more token for the first rows of the call before it.
        """


class DraftedTokens(NamedTuple):
    entries: Int64Array  # [D] indices into the batch
    token_ids: torch.Tensor  # [D] int64, on the device
    has_caught_up: bool = False  # with a row that lacked many tokens


class _Round(NamedTuple):
    """Rows that want drafts in a step, those with the most first."""

    rows: Int32Array  # [n]
    entries: Int64Array  # [n] index of the first draft in the batch; the others follow it
    num_known: Int32Array  # [n] tokens before the first draft
    num_drafts: Int64Array  # [n]

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "_Round":
        entries = np.flatnonzero(batch.draft_tokens == TO_DRAFT)
        rows, firsts, num_drafts = np.unique(batch.rows[entries], return_index=True, return_counts=True)
        entries = entries[firsts]
        return cls(rows, entries, batch.start_positions[entries], num_drafts).only(np.argsort(-num_drafts))

    def only(self, chosen: npt.NDArray[Any]) -> "_Round":
        return _Round(*(column[chosen] for column in self))


class Drafter:
    def __init__(
        self, model: DraftModel, rows: RowTable, sender: InputSender, info: RunnerInfo, kv: KVTensors
    ) -> None:
        try:
            model.allocate(kv)
        except (RuntimeError, OSError) as error:
            message = f"the draft's KV cache of {len(kv.blocks)} blocks cannot be allocated"
            raise ConfigError(f"{message}: lower num_blocks, kv_cache_memory_mb or gpu_memory_utilization") from error
        self._model, self._rows, self._sender, self._has_cache = model, rows, sender, model.block_bytes > 0
        self._num_idle_steps = 0
        self._most_tokens, self._most_caught_up = info.max_num_batched_tokens, MOST_CAUGHT_UP[kv.device.type]
        self._num_cached = np.zeros(info.max_num_seqs, dtype=np.int32)  # leading tokens of each row
        self._is_cached = np.zeros((len(kv.blocks), info.block_size), dtype=np.bool_)

    def begin(self, batch: ScheduledBatch, host: HostInputs, changes: Group) -> tuple[DraftedTokens | None, Group]:
        """Make the drafts of a batch, if it wants any. Return them, and the changes that are left to apply."""
        if self._has_cache:
            self._follow(batch, host)
        self._num_idle_steps += 1
        if not (batch.draft_tokens == TO_DRAFT).any():
            return None, changes
        self._num_idle_steps = 0
        return self._draft(batch, changes), ()

    def read_prompts(self, batch: ScheduledBatch) -> None:
        """Compute what the serving model has computed of prompts, for rows that lack at most a block before it."""
        if batch.num_tokens == batch.num_decodes or not self._has_cache or self._num_idle_steps >= IDLE_STEPS:
            return
        starts, new = self._num_cached[batch.rows], batch.num_scheduled_tokens
        counts = batch.start_positions + new - self._model.shift - starts
        is_read = (new > 1) & (counts > 0) & (counts - new <= self._is_cached.shape[1])
        is_read &= np.cumsum(counts * is_read) <= self._most_tokens
        if is_read.any():
            samples = np.zeros(np.count_nonzero(is_read), dtype=np.bool_)
            step = _catch_up(batch.rows[is_read], starts[is_read], counts[is_read], samples)
            try:
                self._computed(step, is_first=True)
            except torch.OutOfMemoryError:  # the serving model's step is computed, and stays
                self._num_idle_steps = IDLE_STEPS

    def _follow(self, batch: ScheduledBatch, host: HostInputs) -> None:
        """Note the slots that a step of the serving model rewrites, and what is cached of new rows."""
        for blocks in (batch.transfers.copy_targets, batch.transfers.swap_in_blocks):
            self._is_cached[blocks] = False
        slots = self._is_cached.reshape(-1)
        slots[host.slot_mapping] = False
        for new in batch.new_rows:
            positions = np.arange(len(new.token_ids))
            cached = slots[self._rows.slots(np.full(len(positions), new.row), positions)]
            self._num_cached[new.row] = np.argmin(np.append(cached, False))
        firsts = np.flatnonzero(np.diff(batch.rows, prepend=-1))  # entries of a row are adjacent
        rows = batch.rows[firsts]
        self._num_cached[rows] = np.minimum(self._num_cached[rows], batch.start_positions[firsts])

    def _draft(self, batch: ScheduledBatch, changes: Group) -> DraftedTokens:
        """Store drafts in the row table, after the batch's `changes`. A row that lacks too many tokens gets none."""
        if changes:
            self._rows.apply(batch, self._sender({"changes": changes})["changes"])
        wanted = _Round.of(batch)
        ends = wanted.num_known - self._model.shift
        starts = np.maximum(ends - 1, 0)
        if self._has_cache:
            starts = np.minimum(self._num_cached[wanted.rows], starts)
        num_missing = ends - starts
        lags = np.where(num_missing > MOST_AS_DECODES, num_missing, 0)
        parts = np.clip(self._most_caught_up - (np.cumsum(lags) - lags), 0, lags)
        counts = np.where(lags, parts, num_missing)
        counts = np.clip(self._most_tokens - (np.cumsum(counts) - counts), 0, counts)
        if not counts.any():  # `shift` leaves nothing of one token
            return DraftedTokens(wanted.entries[:0], torch.empty(0, dtype=torch.int64))
        is_complete = (counts == num_missing) & (counts > 0)
        first = _catch_up(wanted.rows, starts, counts, is_complete)
        entries, tokens = [wanted.entries[is_complete]], [self._computed(first, is_first=True)]
        wanted = wanted.only(is_complete)
        for index in range(1, int(wanted.num_drafts.max(initial=0))):
            wanted = wanted.only(wanted.num_drafts > index)
            ones = np.ones(len(wanted.rows), dtype=np.int32)
            starts = wanted.num_known + np.int32(index - 1 - self._model.shift)
            entries.append(wanted.entries + index)
            tokens.append(self._computed(ScheduledBatch.of(wanted.rows, starts, ones, ones > 0), is_first=False))
        return DraftedTokens(
            np.concatenate(entries), torch.cat(tokens), bool(parts.sum() > self._most_caught_up // 8)
        )

    def _computed(self, step: ScheduledBatch, *, is_first: bool) -> torch.Tensor:
        """Return the next tokens [S] int64 of a step's rows, which are also stored."""
        model, host = self._model, self._rows.host_inputs(step)
        token_indices, store_indices = host.token_indices + model.shift, host.store_indices + model.shift
        host = host._replace(token_indices=token_indices, store_indices=store_indices)
        inputs = StepInputs(*self._sender({"inputs": host})["inputs"])
        token_ids = self._rows.known_tokens_at(inputs.token_indices, model.vocab_size)
        meta = self._rows.metadata(inputs, ForwardBounds.exact(step, host))
        forward = ForwardInput(token_ids, inputs.positions, meta, model.kv_layers, inputs.logit_indices)
        drafts = model.draft(forward, is_first=is_first)
        if self._has_cache and (is_first or model.keeps_drafts):
            self._is_cached.reshape(-1)[host.slot_mapping] = True
            self._num_cached[step.rows] = host.seq_lens  # of a row's entries, the last counts
        self._rows.store(inputs.store_indices, drafts)
        return drafts


def _catch_up(rows: Int32Array, starts: Int32Array, counts: Int32Array, samples: BoolArray) -> ScheduledBatch:
    """Return a step of chunks, some of them empty, or of all their tokens one by one if they are few."""
    if int(counts.sum()) > MOST_AS_DECODES:
        some = counts > 0
        return ScheduledBatch.of(rows[some], starts[some], counts[some], samples[some])
    owners = np.repeat(np.arange(len(rows)), counts)
    offsets = (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]).astype(np.int32)
    is_last = samples[owners] & (offsets + 1 == counts[owners])
    return ScheduledBatch.of(rows[owners], starts[owners] + offsets, np.ones(len(owners), dtype=np.int32), is_last)


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
    token_bytes: int  # of its own cache, for a token
    load: Callable[[CausalLM, int, Progress], DraftModel]  # of the serving model, loaded, and its block size


def find_draft_source(plan: ModelPlan, beside: int | None) -> DraftSource | None:
    """Return the model or layers that draft for the planned model, or None if neither is wanted.

    `beside`: bytes of the planned model's weights; None: both fit, on another machine. Raise `ConfigError`.
    """
    config, native = plan.config, plan.native
    if config.speculation in ("none", "prompt_lookup"):
        return None
    if config.speculation == "draft_model":
        draft = plan_draft(plan)
        with refused_draft(draft.folder):
            source = draft.open_source()
            num_bytes = 0 if beside is None else draft.check_fits(source, beside)
            assert draft.native is not None, "others are refused"
            token_bytes = CacheLayout(draft.native.shape, 1, draft.cache_dtype).block_bytes
            return DraftSource(num_bytes, token_bytes, partial(_load_draft, draft, source))
    if not isinstance(native, Decoder):
        raise ConfigError(
            f"speculation is {config.speculation}: {plan.architecture} does not run on the native decoder, whose "
            "layers or states it needs; set it to draft_model or prompt_lookup"
        )
    if config.speculation == "eagle3":
        folder = find_draft(config, resolve_folder)
        with refused_draft(folder):
            head = Eagle3Source.of(plan, native.config, folder, beside)
        return DraftSource(head.num_bytes, head.token_bytes, head.load)
    wanted, total = config.num_draft_layers, native.shape.num_layers
    if wanted is not None and wanted > total:
        raise ConfigError(f"num_draft_layers is {wanted}: the model has {total} layers; set it to at most {total}")
    return DraftSource(0, 0, partial(_first_layers, wanted or max(total // 4, 1)))


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
            raise ConfigError(f"{draft.architecture} does not run on the native decoder: take a draft that does")
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
