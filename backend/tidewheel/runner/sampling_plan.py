from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Float32Array, Int32Array, Int64Array, NewRow, RowArray, RowError, ScheduledBatch
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel.runner.grammar_masks import GrammarRows, MaskJob, packed
from tidewheel.runner.inputs import Group, Groups, HostInputs
from tidewheel.sampling import LogitBias

UInt64Array = npt.NDArray[np.uint64]
Array = TypeVar("Array", Int32Array, Float32Array)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MANTISSA_BITS = 24
FORBIDDEN = np.float32(-np.inf)
NO_LOGPROBS = -1
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def uniform(seeds: UInt64Array, positions: npt.NDArray[np.integer[Any]]) -> Float32Array:
    """Return random numbers [n] float32 in [0, 1), a pure function of (seed, position).

    Counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") on the finaliser of
    SplitMix64 (Steele, Lea and Flood 2014).
    """
    counters = positions.astype(np.uint64) * _GOLDEN
    bits = _mixed(_mixed(seeds + _GOLDEN) + counters)
    return (bits >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float32) * np.float32(2.0**-_MANTISSA_BITS)


def _mixed(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


class LogitRules:
    """A request's allowed tokens, biases, forbidden words, and stop tokens forbidden before `min_tokens`."""

    def __init__(self, new: NewRow, vocab_size: int) -> None:
        request, sampling = new.request, new.sampling
        token_ids, values = request.logit_bias or LogitBias.of(sampling.logit_bias)
        # Grammar masks handle stop and allowed tokens.
        stops, allowed = ((), ()) if request.grammar else (request.stop_token_ids, sampling.allowed_token_ids)
        self.allowed = packed(allowed, -(-vocab_size // 32)).view(np.int32) if allowed else None
        self._always = token_ids, values
        self._at_first = (
            np.concatenate((token_ids, np.array(stops, dtype=np.int32))),
            np.concatenate((values, np.full(len(stops), FORBIDDEN))),
        )
        self._first_stop_position = request.num_prompt_tokens + sampling.min_tokens
        words = sorted(request.bad_words_ids, key=len)
        self._word_lengths = np.array([len(word) for word in words], dtype=np.int32)
        self._word_tokens = np.array([token for word in words for token in word], dtype=np.int32)

    @staticmethod
    def needed(new: NewRow) -> bool:
        request, sampling = new.request, new.sampling
        has_bias = request.logit_bias is not None or bool(sampling.logit_bias)
        return has_bias or bool(sampling.min_tokens or request.bad_words_ids or sampling.allowed_token_ids)

    def biases(self, position: int) -> tuple[Int32Array, Float32Array]:
        return self._at_first if position < self._first_stop_position else self._always

    def words(self, position: int) -> tuple[Int32Array, Int32Array]:
        """Return lengths and concatenated tokens of the forbidden words that could end at `position`."""
        count = int(np.searchsorted(self._word_lengths, position + 1, side="right"))
        lengths = self._word_lengths[:count]
        return lengths, self._word_tokens[: int(lengths.sum())]


def reads_all_logits(new: NewRow) -> bool:
    """Return whether a row's sampling ever reads all logits for more than a draw."""
    request, sampling = new.request, new.sampling
    is_changed = LogitRules.needed(new) or sampling.has_penalties or request.grammar is not None
    return is_changed or sampling.logprobs is not None


class DrawColumns(NamedTuple):
    """Host arrays of S rows for `tidewheel_kernels.SamplingTensors`."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    uniform: Float32Array

    def flags(self) -> list[bool]:
        sampled = self.temperature > 0
        uses = sampled, self.top_k > 0, self.top_p < 1, self.min_p > 0
        return [bool((sampled & use).any()) for use in uses]

    def padded(self, num_rows: int) -> "DrawColumns":
        extra = num_rows - len(self.temperature)
        if extra <= 0:
            return self
        pairs = zip(self, greedy_columns(extra), strict=True)
        return DrawColumns(*(np.concatenate(pair) for pair in pairs))


def greedy_columns(num_rows: int) -> DrawColumns:
    zeros = np.zeros(num_rows, dtype=np.float32)
    return DrawColumns(zeros, zeros.astype(np.int32), np.ones(num_rows, dtype=np.float32), zeros, zeros)


# Prompt positions whose logits exist at once: 2,048 take 622 MB (152,000 tokens, bfloat16), 512 are compute-bound.
SCORED_AT_ONCE = 512


class PromptScoring(NamedTuple):
    """Inputs to score P positions in the prompt chunks of R rows."""

    batch_indices: Int64Array  # [R]
    counts: Int32Array  # [R] positions from the chunk's start
    num_top: Int32Array  # [R]
    scored: Int64Array  # [P] tokens of the step


class PoolingPlan(NamedTuple):
    """Inputs to sum the hidden states of P tokens in R rows."""

    batch_indices: Int64Array  # [R]
    hidden_indices: Int64Array  # [P] tokens of the step
    owners: Int64Array  # [P] in [0, R)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Inputs to sample S rows, to score prompts and to pool; None for unneeded stages."""

    draw: DrawColumns
    flags: list[bool]  # of `tidewheel_kernels.SamplingTensors`
    allowed: Group | None  # sampling rows [R] and their bit sets [R * words]
    bias: Group | None  # sampling rows, token ids and values [N], which are added to the logits
    words: Group | None  # fields of `tidewheel_kernels.WordTensors`
    penalties: Group | None  # fields of `tidewheel_kernels.PenaltyTensors`
    max_num_tokens: int  # of the rows with penalties
    logprob_rows: Int64Array  # [L] sampling rows
    num_top_logprobs: Int32Array  # [L]
    masks: MaskJob | None
    scoring: PromptScoring | None
    pooling: PoolingPlan | None
    reads_all: bool | None  # whether a row's parameters may ever need all logits; None: of one rank

    @property
    def logit_use(self) -> Literal["largest", "draw", "all"]:
        """Return what logits are read for, equal on all ranks; "all": also for changes or log-probabilities."""
        needs_all = self.changes_logits or len(self.logprob_rows) > 0 if self.reads_all is None else self.reads_all
        return "all" if needs_all else "draw" if self.flags[0] else "largest"

    @property
    def changes_logits(self) -> bool:
        changes = (self.allowed, self.bias, self.words, self.penalties, self.masks)
        return any(change is not None for change in changes)

    def groups(self, num_rows: int = 0) -> Groups:
        scoring, pooling = self.scoring, self.pooling
        return {
            "draw": self.draw.padded(num_rows),
            "allowed": self.allowed,
            "bias": self.bias,
            "words": self.words,
            "penalties": self.penalties,
            "logprob_rows": (self.logprob_rows,) if len(self.logprob_rows) else None,
            "mask_rows": None if self.masks is None else (self.masks.rows,),
            "prompt": None if scoring is None else (scoring.scored,),
            "pooling": None if pooling is None else (pooling.hidden_indices, pooling.owners),
        }


class SamplingTable:
    def __init__(
        self, max_num_seqs: int, vocab_size: int, accelerator: CudaAccelerator | None, num_ranks: int
    ) -> None:
        self._vocab_size, self._num_ranks = vocab_size, num_ranks
        self.grammars = GrammarRows(accelerator)
        self._floats = {name: np.zeros(max_num_seqs, dtype=np.float32) for name in FLOATS}
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._top_k, self._num_prompt_tokens = np.zeros((2, max_num_seqs), dtype=np.int32)
        self._num_logprobs, self._num_prompt_logprobs = np.full((2, max_num_seqs), NO_LOGPROBS, dtype=np.int32)
        self._has_rules, self._has_penalties, self._reads_all = np.zeros((3, max_num_seqs), dtype=np.bool_)
        self._pools_last, self._pools_all = np.zeros((2, max_num_seqs), dtype=np.bool_)
        self._with_more: set[int] = set()  # that score or pool
        self._rules: dict[int, LogitRules] = {}

    def update(self, batch: ScheduledBatch) -> None:
        """Raise `RowError` for parameters that cannot be prepared."""
        for row in batch.freed_rows.tolist():
            self._has_rules[row] = False
            self._rules.pop(row, None)
            self._with_more.discard(row)
            self.grammars.leave(row)
        for new in batch.new_rows:
            try:
                self._fill(new)
            except Exception as error:
                raise RowError(new.row) from error

    def _fill(self, new: NewRow) -> None:
        row, request, _, sampling = new
        for name, column in self._floats.items():
            column[row] = getattr(sampling, name)
        self._top_k[row] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        self._seeds[row] = request.seed
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        self._reads_all[row] = self._num_ranks > 1 and reads_all_logits(new)
        self._has_penalties[row] = sampling.has_penalties
        self._num_logprobs[row] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        of_prompt = sampling.prompt_logprobs
        self._num_prompt_logprobs[row] = NO_LOGPROBS if of_prompt is None else of_prompt
        self._pools_last[row] = request.pooling == "last"
        self._pools_all[row] = request.pooling == "mean"
        if request.pooling or of_prompt is not None:
            self._with_more.add(row)
        self._has_rules[row] = LogitRules.needed(new)
        if self._has_rules[row]:
            self._rules[row] = LogitRules(new, self._vocab_size)
        self.grammars.enter(new)

    def plan(self, batch: ScheduledBatch, host: HostInputs) -> SamplingPlan:
        rows, positions = batch.rows[batch.samples], host.seq_lens[batch.samples]
        temperature = self._floats["temperature"][rows]
        any_sampled = bool((temperature > 0).any())
        draw = DrawColumns(
            temperature,
            self._top_k[rows],
            self._floats["top_p"][rows],
            self._floats["min_p"][rows],
            uniform(self._seeds[rows], positions) if any_sampled else np.zeros(len(rows), dtype=np.float32),
        )
        indices = np.flatnonzero(self._has_rules[rows]).tolist()
        ruled = [(i, int(positions[i]), self._rules[int(rows[i])]) for i in indices]
        num_logprobs = self._num_logprobs[rows]
        logprob_rows = np.flatnonzero(num_logprobs >= 0)
        with_penalties = np.flatnonzero(self._has_penalties[rows])
        return SamplingPlan(
            draw=draw,
            flags=draw.flags() if any_sampled else [False] * 4,
            allowed=_allowed_columns(ruled),
            bias=_joined([(i, rules.biases(position)) for i, position, rules in ruled]),
            words=_word_columns(ruled),
            penalties=self._penalty_columns(rows, positions, with_penalties) if len(with_penalties) else None,
            max_num_tokens=int(positions[with_penalties].max(initial=0)),
            logprob_rows=logprob_rows,
            num_top_logprobs=num_logprobs[logprob_rows],
            masks=self.grammars.start(batch, positions) if self.grammars.states else None,
            scoring=self._scoring(batch) if self._with_more else None,
            pooling=self._pooling(batch) if self._with_more else None,
            reads_all=bool(self._reads_all[rows].any()) if self._num_ranks > 1 else None,
        )

    def _scoring(self, batch: ScheduledBatch) -> PromptScoring | None:
        num_top = self._num_prompt_logprobs[batch.rows]
        num_left = self._num_prompt_tokens[batch.rows] - 1 - batch.start_positions
        counts = np.minimum(batch.num_scheduled_tokens, num_left)
        chosen = np.flatnonzero((num_top >= 0) & (counts > 0))
        if not len(chosen):
            return None
        starts = np.cumsum(batch.num_scheduled_tokens, dtype=np.int64) - batch.num_scheduled_tokens
        scored = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in chosen.tolist()])
        return PromptScoring(chosen, counts[chosen], num_top[chosen], scored)

    def _pooling(self, batch: ScheduledBatch) -> PoolingPlan | None:
        of_all = self._pools_all[batch.rows]
        chosen = np.flatnonzero(of_all | (self._pools_last[batch.rows] & batch.samples))
        if not len(chosen):
            return None
        ends = np.cumsum(batch.num_scheduled_tokens, dtype=np.int64)
        starts = np.where(of_all, ends - batch.num_scheduled_tokens, ends - 1)
        return PoolingPlan(
            chosen,
            np.concatenate([np.arange(starts[i], ends[i]) for i in chosen.tolist()]),
            np.repeat(np.arange(len(chosen)), (ends - starts)[chosen]),
        )

    def _penalty_columns(self, rows: Int32Array, positions: Int32Array, indices: RowArray) -> Group:
        rows = rows[indices]
        penalties = [self._floats[f"{kind}_penalty"][rows] for kind in ("repetition", "presence", "frequency")]
        return indices.astype(np.int32), self._num_prompt_tokens[rows], positions[indices], *penalties


Ruled = list[tuple[int, int, LogitRules]]  # sampling row, position


def _allowed_columns(ruled: Ruled) -> Group | None:
    entries = [(i, rules.allowed) for i, _, rules in ruled if rules.allowed is not None]
    if not entries:
        return None
    rows, words = zip(*entries, strict=True)
    return np.array(rows, dtype=np.int32), np.concatenate(words)


def _word_columns(ruled: Ruled) -> Group | None:
    words = _joined([(i, rules.words(position)) for i, position, rules in ruled])
    if words is None:
        return None
    rows, lengths, token_ids = words
    return rows, np.cumsum(lengths, dtype=np.int32) - lengths, lengths, token_ids


def _joined(entries: list[tuple[int, tuple[Int32Array, Array]]]) -> tuple[Int32Array, Int32Array, Array] | None:
    entries = [(row, arrays) for row, arrays in entries if len(arrays[0])]
    if not entries:
        return None
    rows, counts = np.array([(row, len(arrays[0])) for row, arrays in entries], dtype=np.int32).T
    first, second = (np.concatenate(parts) for parts in zip(*(arrays for _, arrays in entries), strict=True))
    return np.repeat(rows, counts), first, second
