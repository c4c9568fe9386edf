from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Float32Array, Int32Array, Int64Array, NewRow, RowError, ScheduledBatch
from tidewheel.runner.accelerator import Accelerator
from tidewheel.runner.grammar_masks import GrammarRows, MaskJob, packed
from tidewheel.runner.staging import Groups
from tidewheel.sampling import LogitBias

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MANTISSA_BITS = 24
FORBIDDEN = np.float32(-np.inf)
NO_LOGPROBS = -1


def uniform(seeds: UInt64Array, positions: npt.NDArray[np.integer[Any]]) -> Float32Array:
    """Return [n] float32 in [0, 1), a pure function of (seed, position).

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


class BiasEntries(NamedTuple):
    token_ids: Int32Array
    values: Float32Array


NO_BIASES = BiasEntries(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


class WordEntries(NamedTuple):
    lengths: Int32Array
    token_ids: Int32Array  # concatenated words


class LogitRules:
    """Allowed tokens, biases, stop tokens forbidden before `min_tokens`, and forbidden words of a request."""

    def __init__(self, new: NewRow, vocab_size: int) -> None:
        self._always = NO_BIASES
        if new.sampling.logit_bias:
            bias = LogitBias.of(new.sampling.logit_bias)
            self._always = BiasEntries(bias.token_ids, bias.amounts)
        # Grammar masks handle stop and allowed tokens.
        stops, allowed = ((), ()) if new.grammar else (new.stop_token_ids, new.sampling.allowed_token_ids)
        self.allowed = packed(allowed, -(-vocab_size // 32)).view(np.int32) if allowed else None
        self._at_first = BiasEntries(
            np.concatenate((self._always.token_ids, np.array(stops, dtype=np.int32))),
            np.concatenate((self._always.values, np.full(len(stops), FORBIDDEN))),
        )
        self._first_stop_position = new.num_prompt_tokens + new.sampling.min_tokens
        words = sorted(new.bad_words_ids, key=len)
        self._words = WordEntries(
            np.array([len(word) for word in words], dtype=np.int32),
            np.array([token for word in words for token in word], dtype=np.int32),
        )

    @staticmethod
    def needed(new: NewRow) -> bool:
        sampling = new.sampling
        return bool(sampling.logit_bias or sampling.min_tokens or new.bad_words_ids or sampling.allowed_token_ids)

    def biases(self, position: int) -> BiasEntries:
        return self._at_first if position < self._first_stop_position else self._always

    def words(self, position: int) -> WordEntries:
        lengths, token_ids = self._words
        count = int(np.searchsorted(lengths, position + 1, side="right"))
        return WordEntries(lengths[:count], token_ids[: int(lengths[:count].sum())])


class DrawColumns(NamedTuple):
    """Columns [S] of `tidewheel_kernels.SamplingTensors`."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    uniform: Float32Array

    def padded(self, num_rows: int) -> DrawColumns:
        extra = num_rows - len(self.temperature)
        if extra <= 0:
            return self
        pairs = zip(self, greedy_columns(extra), strict=True)
        return DrawColumns(*(np.concatenate(pair) for pair in pairs))


def greedy_columns(num_rows: int) -> DrawColumns:
    zeros = np.zeros(num_rows, dtype=np.float32)
    return DrawColumns(zeros, zeros.astype(np.int32), np.ones(num_rows, dtype=np.float32), zeros, zeros)


class AllowedColumns(NamedTuple):
    rows: Int32Array  # [R]
    words: Int32Array  # [R * words]


class BiasColumns(NamedTuple):
    """Columns [N]: `values[i]` is added to logit `token_ids[i]` of sampling row `rows[i]`."""

    rows: Int32Array
    token_ids: Int32Array
    values: Float32Array


class WordColumns(NamedTuple):
    """Columns of `tidewheel_kernels.WordTensors`."""

    rows: Int32Array  # [W]
    starts: Int32Array  # [W]
    lengths: Int32Array  # [W]
    token_ids: Int32Array  # [N]


class PenaltyColumns(NamedTuple):
    """Columns [P] of `tidewheel_kernels.PenaltyTensors`."""

    rows: Int32Array
    num_prompt_tokens: Int32Array
    num_tokens: Int32Array
    repetition: Float32Array
    presence: Float32Array
    frequency: Float32Array


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Inputs to sample S rows; None for unneeded stages."""

    draw: DrawColumns
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    allowed: AllowedColumns | None
    bias: BiasColumns | None
    words: WordColumns | None
    penalties: PenaltyColumns | None
    logprob_rows: Int64Array  # [L] sampling rows
    num_top_logprobs: Int32Array  # [L]
    masks: MaskJob | None

    @property
    def changes_logits(self) -> bool:
        changes = (self.allowed, self.bias, self.words, self.penalties, self.masks)
        return any(change is not None for change in changes)

    @property
    def is_plain(self) -> bool:
        return not self.changes_logits and not len(self.logprob_rows)

    def groups(self, num_rows: int = 0) -> Groups:
        return {
            "draw": self.draw.padded(num_rows),
            "allowed": self.allowed,
            "bias": self.bias,
            "words": self.words,
            "penalties": self.penalties,
            "logprob_rows": (self.logprob_rows,) if len(self.logprob_rows) else None,
            "mask_rows": None if self.masks is None else (self.masks.rows,),
        }


# Prompt positions whose logits exist at once: 2,048 take 622 MB (152,000 tokens, bfloat16), 512 are compute-bound.
SCORED_AT_ONCE = 512


class PromptScoring(NamedTuple):
    """R chunks with P scored prompt positions."""

    batch_indices: Int64Array  # [R]
    counts: Int32Array  # [R] positions from the chunk's start
    num_top: Int32Array  # [R]
    scored: Int64Array  # [P] tokens of the step
    with_sampled: Int64Array  # [S + P] ascending
    sampled_rows: Int64Array  # [S] indices into `with_sampled`
    scored_rows: Int64Array  # [P] indices into `with_sampled`


class PoolingPlan(NamedTuple):
    """R pooled rows, and the P tokens whose hidden states are summed."""

    batch_indices: Int64Array  # [R]
    hidden_indices: Int64Array  # [P] tokens of the step
    owners: Int64Array  # [P] in [0, R)


class SamplingTable:
    def __init__(self, max_num_seqs: int, vocab_size: int, accelerator: Accelerator | None = None) -> None:
        self._vocab_size = vocab_size
        self.grammars = GrammarRows(accelerator)
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self._has_penalties = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int32)
        self._num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int32)
        self._pools_last = np.zeros(max_num_seqs, dtype=np.bool_)
        self._pools_all = np.zeros(max_num_seqs, dtype=np.bool_)
        self._with_more: set[int] = set()  # that score or pool
        self._has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self._rules: dict[int, LogitRules] = {}

    def update(self, batch: ScheduledBatch) -> None:
        """Add and remove rows. Raise `RowError` for parameters that fail."""
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
        row, sampling = new.row, new.sampling
        self._temperature[row] = sampling.temperature
        self._top_k[row] = max(sampling.top_k, 0)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = new.seed
        self._repetition[row] = sampling.repetition_penalty
        self._presence[row] = sampling.presence_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._has_penalties[row] = sampling.has_penalties
        self._num_logprobs[row] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        of_prompt = sampling.prompt_logprobs
        self._num_prompt_logprobs[row] = NO_LOGPROBS if of_prompt is None else of_prompt
        self._pools_last[row] = new.pooling == "last"
        self._pools_all[row] = new.pooling == "mean"
        if new.pooling or of_prompt is not None:
            self._with_more.add(row)
        else:
            self._with_more.discard(row)
        self._rules.pop(row, None)
        self._has_rules[row] = needed = LogitRules.needed(new)
        if needed:
            self._rules[row] = LogitRules(new, self._vocab_size)
        self.grammars.enter(new)

    def plan(self, rows: Int32Array, positions: Int32Array) -> SamplingPlan:
        temperature = self._temperature[rows]
        sampled = temperature > 0
        any_sampled = bool(sampled.any())
        draw = DrawColumns(
            temperature,
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            uniform(self._seeds[rows], positions) if any_sampled else np.zeros(len(rows), dtype=np.float32),
        )
        ruled = [(i, self._rules[int(rows[i])]) for i in np.flatnonzero(self._has_rules[rows]).tolist()]
        num_logprobs = self._num_logprobs[rows]
        logprob_rows = np.flatnonzero(num_logprobs >= 0)
        return SamplingPlan(
            draw=draw,
            any_sampled=any_sampled,
            any_top_k=any_sampled and bool((draw.top_k[sampled] > 0).any()),
            any_top_p=any_sampled and bool((draw.top_p[sampled] < 1).any()),
            any_min_p=any_sampled and bool((draw.min_p[sampled] > 0).any()),
            allowed=_allowed_columns(ruled),
            bias=_bias_columns(ruled, positions),
            words=_word_columns(ruled, positions),
            penalties=self._penalty_columns(rows, positions),
            logprob_rows=logprob_rows,
            num_top_logprobs=num_logprobs[logprob_rows],
            masks=self.grammars.start(rows, positions),
        )

    def scoring(self, batch: ScheduledBatch, sampled: Int64Array) -> PromptScoring | None:
        """Return the positions to score; `sampled` [S] are the tokens to sample from."""
        if not self._with_more:
            return None
        num_top = self._num_prompt_logprobs[batch.rows]
        num_left = self._num_prompt_tokens[batch.rows] - 1 - batch.start_positions
        counts = np.minimum(batch.num_scheduled_tokens, num_left)
        chosen = np.flatnonzero((num_top >= 0) & (counts > 0))
        if not len(chosen):
            return None
        ends = np.cumsum(batch.num_scheduled_tokens, dtype=np.int64)
        starts = ends - batch.num_scheduled_tokens
        scored = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in chosen.tolist()])
        indices = np.sort(np.concatenate((scored, sampled)))
        return PromptScoring(
            chosen,
            counts[chosen],
            num_top[chosen],
            scored,
            indices,
            np.searchsorted(indices, sampled),
            np.searchsorted(indices, scored),
        )

    def pooling(self, batch: ScheduledBatch) -> PoolingPlan | None:
        if not self._with_more:
            return None
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

    def _penalty_columns(self, rows: Int32Array, positions: Int32Array) -> PenaltyColumns | None:
        indices = np.flatnonzero(self._has_penalties[rows])
        if not len(indices):
            return None
        rows = rows[indices]
        return PenaltyColumns(
            rows=indices.astype(np.int32),
            num_prompt_tokens=self._num_prompt_tokens[rows],
            num_tokens=positions[indices],
            repetition=self._repetition[rows],
            presence=self._presence[rows],
            frequency=self._frequency[rows],
        )


def _allowed_columns(ruled: list[tuple[int, LogitRules]]) -> AllowedColumns | None:
    entries = [(i, rules.allowed) for i, rules in ruled if rules.allowed is not None]
    if not entries:
        return None
    rows, words = zip(*entries, strict=True)
    return AllowedColumns(np.array(rows, dtype=np.int32), np.concatenate(words))


def _bias_columns(ruled: list[tuple[int, LogitRules]], positions: Int32Array) -> BiasColumns | None:
    entries = [(i, rules.biases(int(positions[i]))) for i, rules in ruled]
    entries = [(i, bias) for i, bias in entries if len(bias.token_ids)]
    if not entries:
        return None
    return BiasColumns(
        rows=_repeated([(i, len(bias.values)) for i, bias in entries]),
        token_ids=np.concatenate([bias.token_ids for _, bias in entries]),
        values=np.concatenate([bias.values for _, bias in entries]),
    )


def _word_columns(ruled: list[tuple[int, LogitRules]], positions: Int32Array) -> WordColumns | None:
    entries = [(i, rules.words(int(positions[i]))) for i, rules in ruled]
    entries = [(i, words) for i, words in entries if len(words.lengths)]
    if not entries:
        return None
    lengths = np.concatenate([words.lengths for _, words in entries])
    return WordColumns(
        rows=_repeated([(i, len(words.lengths)) for i, words in entries]),
        starts=np.cumsum(lengths, dtype=np.int32) - lengths,
        lengths=lengths,
        token_ids=np.concatenate([words.token_ids for _, words in entries]),
    )


def _repeated(counts: list[tuple[int, int]]) -> Int32Array:
    numbers, times = zip(*counts, strict=True)
    return np.repeat(np.array(numbers, dtype=np.int32), times)
