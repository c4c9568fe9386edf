"""Sampling state of every row, kept as columns, and what one step needs of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tidewheel.batch import BoolArray, Float32Array, Int32Array, NewRow, ScheduledBatch
from tidewheel.runner.inputs import Int64Array
from tidewheel.runner.logit_rules import LogitRules
from tidewheel.runner.uniform import uniform

NO_LOGPROBS = -1


class DrawColumns(NamedTuple):
    """[S] each; see `tidewheel_kernels.SamplingTensors`."""

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    uniform: Float32Array

    def padded(self, num_rows: int) -> DrawColumns:
        """With greedy rows after these, `num_rows` in all."""
        extra = num_rows - len(self.temperature)
        if extra == 0:
            return self
        pairs = zip(self, greedy_columns(extra), strict=True)
        return DrawColumns(*(np.concatenate(pair) for pair in pairs))


def greedy_columns(num_rows: int) -> DrawColumns:
    zeros = np.zeros(num_rows, dtype=np.float32)
    return DrawColumns(zeros, zeros.astype(np.int32), np.ones(num_rows, dtype=np.float32), zeros, zeros)


class BiasColumns(NamedTuple):
    """[N] each: add values[i] to the logit of token_ids[i] in sampling row rows[i]."""

    rows: Int32Array
    token_ids: Int32Array
    values: Float32Array


class PenaltyColumns(NamedTuple):
    """See `tidewheel_kernels.PenaltyTensors`."""

    rows: Int32Array  # [N]
    token_ids: Int32Array  # [N]
    output_counts: Int32Array  # [N]
    in_prompt: BoolArray  # [N]
    repetition: Float32Array  # [S]
    presence: Float32Array  # [S]
    frequency: Float32Array  # [S]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What sampling S rows takes; None for a stage that no row needs."""

    draw: DrawColumns
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    bias: BiasColumns | None
    penalties: PenaltyColumns | None
    logprob_rows: Int64Array  # [L] sampling rows whose log-probabilities are wanted
    num_top_logprobs: Int32Array  # [L]
    observers: list[tuple[int, LogitRules]]  # rules to tell the token of sampling row i

    @property
    def is_plain(self) -> bool:
        """Whether the logits of the model are sampled as they are, and nothing else is asked of them."""
        return self.bias is None and self.penalties is None and not len(self.logprob_rows)


class SamplingTable:
    """One element per row, written when a request takes the row."""

    def __init__(self, max_num_seqs: int) -> None:
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int32)
        self._has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self._rules: dict[int, LogitRules] = {}

    def update(self, batch: ScheduledBatch) -> None:
        for row in batch.freed_rows.tolist():
            self._has_rules[row] = False
            self._rules.pop(row, None)
        for new in batch.new_rows:
            self._fill(new)

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
        self._num_logprobs[row] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        self._rules.pop(row, None)
        self._has_rules[row] = needed = LogitRules.needed(new)
        if needed:
            self._rules[row] = LogitRules(new)

    def reads_history(self, rows: Int32Array) -> bool:
        """Whether a step of these rows has to know every token sampled before."""
        return any(self._rules[row].reads_history for row in rows[self._has_rules[rows]].tolist())

    def plan(self, rows: Int32Array, positions: Int32Array) -> SamplingPlan:
        """For the tokens at `positions[i]` of `rows[i]`."""
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
            bias=_bias_columns(ruled, positions),
            penalties=self._penalty_columns(ruled, rows),
            logprob_rows=logprob_rows,
            num_top_logprobs=num_logprobs[logprob_rows],
            observers=[(i, rules) for i, rules in ruled if rules.reads_history],
        )

    def _penalty_columns(self, ruled: list[tuple[int, LogitRules]], rows: Int32Array) -> PenaltyColumns | None:
        counted = [(i, rules.counts.columns()) for i, rules in ruled if rules.counts is not None]
        if not counted:
            return None
        ids, counts, in_prompt = zip(*(columns for _, columns in counted), strict=True)
        return PenaltyColumns(
            rows=np.repeat(np.array([i for i, _ in counted], dtype=np.int32), [len(part) for part in ids]),
            token_ids=np.concatenate(ids),
            output_counts=np.concatenate(counts),
            in_prompt=np.concatenate(in_prompt),
            repetition=self._repetition[rows],
            presence=self._presence[rows],
            frequency=self._frequency[rows],
        )


def _bias_columns(ruled: list[tuple[int, LogitRules]], positions: Int32Array) -> BiasColumns | None:
    entries = [(i, rules.biases(int(positions[i]))) for i, rules in ruled]
    entries = [(i, bias) for i, bias in entries if len(bias.token_ids)]
    if not entries:
        return None
    return BiasColumns(
        rows=np.repeat(np.array([i for i, _ in entries], dtype=np.int32), [len(bias.values) for _, bias in entries]),
        token_ids=np.concatenate([bias.token_ids for _, bias in entries]),
        values=np.concatenate([bias.values for _, bias in entries]),
    )
