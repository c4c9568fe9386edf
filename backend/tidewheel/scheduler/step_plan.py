import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tidewheel.batch import (
    NO_DRAFT,
    BoolArray,
    Int32Array,
    Int64Array,
    NewRow,
    RowArray,
    ScheduledBatch,
    TransferArrays,
)
from tidewheel.request import Request
from tidewheel.scheduler.policy import Rank

MAX_URGENT = 15  # steps of CRITICAL requests in a row, while others could run
_LEAST_S = 1e-6  # of a step, if the clock stands still


class StepLimits(NamedTuple):
    token_budget: int
    max_chunk_tokens: int  # per request
    max_running: int  # for entering only
    max_joins: int  # requests that never started
    max_scores: int  # drafts, or scored prompt positions
    keep_free: int  # blocks, while others run
    slice_s: float | None = None  # longest time of the step
    max_decodes: int | None = None  # rows that decode


class StepChunk(NamedTuple):
    row: int
    start: int
    num_tokens: int
    samples: bool  # reaches the last token


class SplitChunk(NamedTuple):
    position: int  # of the chunk
    num_missing: int  # tokens
    level: Rank  # largest that shares the budget
    max_tokens: int


class Turn(NamedTuple):
    shape: str
    is_urgent: bool  # CRITICAL requests alone


class InFlightStep(NamedTuple):
    step_id: int
    rows: RowArray  # [n]
    epochs: Int64Array  # [n] at scheduling
    scheduled_at: float  # seconds
    started: list[Request]
    turn: Turn | None = None
    has_drafts: bool = False
    has_waited: bool = False


class ShapeTurns:
    """Turns of shapes: each step of a model that takes many computes rows of one shape (bucket).

    Deficit round robin (Shreedhar and Varghese, 1995) with measured seconds of steps. A visit adds the longest of the
    shapes' last steps to a shape's balance, and each step is subtracted. Between two steps of a shape, each other
    takes at most the longest step and one of its own, beside urgent turns.
    """

    def __init__(self) -> None:
        self._balances: dict[Turn, float] = {}  # seconds, in the order of visits
        self._last_seconds: dict[Turn, float] = {}
        self._row_seconds: dict[str, float] = {}
        self._num_urgent = 0

    def choose(self, active: Collection[Turn]) -> Turn:
        """Return the next of the turns that have requests; `active` is not empty."""
        kept = {turn: balance for turn, balance in self._balances.items() if turn in active}
        self._balances = kept | dict.fromkeys((turn for turn in active if turn not in kept), 0.0)
        self._last_seconds = {turn: self._last_seconds.get(turn, _LEAST_S) for turn in active}
        kinds = {turn.is_urgent for turn in active}
        is_urgent = True in kinds and (False not in kinds or self._num_urgent < MAX_URGENT)
        chosen = next(turn for turn in self._balances if turn.is_urgent is is_urgent)
        if self._balances[chosen] <= 0.0:
            self._balances[chosen] = max(self._balances[chosen] + max(self._last_seconds.values()), _LEAST_S)
        return chosen

    def max_rows(self, shape: str, slice_s: float | None) -> int | None:
        return None if slice_s is None else max(int(slice_s / self._row_seconds.get(shape, math.inf)), 1)

    def pay(self, turn: Turn, num_rows: int, seconds: float) -> None:
        self._num_urgent = self._num_urgent + 1 if turn.is_urgent else 0
        self._last_seconds[turn] = seconds = max(seconds, _LEAST_S)
        self._row_seconds[turn.shape] = seconds / num_rows
        left = self._balances.pop(turn, 0.0) - seconds
        self._balances = {turn: left} | self._balances if left > 0.0 else self._balances | {turn: left}


class StepPlan:
    """Plan of the next batch, within a token budget.

    A prompt that exceeds the budget left takes half of it. The other half goes first to requests of its level or
    better with less than half as many tokens to compute.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.token_budget = limits.token_budget  # left
        self.bucket: str | None = None  # of the step; None: not chosen yet
        self.turn: Turn | None = None
        self.num_joined = 0
        self.encoder_tokens = 0  # of the requests that entered
        self.started: list[Request] = []
        self.decode_rows: RowArray = np.empty(0, dtype=np.intp)
        self.decode_starts = _ids([])
        self.growing_rows: RowArray = np.empty(0, dtype=np.intp)
        self.growing_starts = _ids([])
        self.num_sitting_out = 0
        self.is_scarce = False  # only CRITICAL requests enter
        self._draft_tokens = _ids([])
        self._chunks: list[StepChunk] = []
        self._cut: SplitChunk | None = None
        self._num_scores_left = limits.max_scores
        self.new_rows: list[NewRow] = []
        self._block_rows: list[int] = []
        self._block_indices: list[int] = []
        self._block_ids: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not len(self.decode_rows) and not self._chunks

    @property
    def has_decodes_alone(self) -> bool:
        return bool(len(self.decode_rows)) and not self._chunks

    def set_decodes(self, rows: RowArray, starts: Int32Array, grows: BoolArray) -> None:
        """Set rows that decode, their positions, and which of them need a block, [n] each."""
        self.decode_rows, self.decode_starts = rows, starts
        self.growing_rows, self.growing_starts = rows[grows], starts[grows]
        self.token_budget -= len(rows)

    def add_drafts(self, counts: Int32Array, drafts: Int32Array, num_slots: Int32Array, block_size: int) -> None:
        """Repeat each row of a step of decodes alone for its `counts` drafts. `num_slots` [n]: what the rows have."""
        counts = counts + 1
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum(), dtype=np.int32) - np.repeat(firsts, counts).astype(np.int32)
        starts = np.repeat(self.decode_starts, counts) + places
        self._draft_tokens = np.full(len(starts), NO_DRAFT, dtype=np.int32)
        self._draft_tokens[places > 0] = drafts
        grows = (starts >= np.repeat(num_slots, counts)) & (starts % block_size == 0)
        self.token_budget += len(counts)
        self.set_decodes(np.repeat(self.decode_rows, counts), starts, grows)

    def num_blocks_kept(self, num_running: int) -> int:
        return len(self.growing_rows) + self.num_sitting_out + (self.limits.keep_free if num_running else 0)

    def drop_decodes(self, victims: list[int]) -> None:
        stays = ~np.isin(self.decode_rows, victims)
        self.token_budget += len(stays) - int(np.count_nonzero(stays))
        self.decode_rows, self.decode_starts = self.decode_rows[stays], self.decode_starts[stays]
        stays = ~np.isin(self.growing_rows, victims)
        self.growing_rows, self.growing_starts = self.growing_rows[stays], self.growing_starts[stays]

    @property
    def chunk_ends(self) -> dict[int, int]:
        return {chunk.row: chunk.start + chunk.num_tokens for chunk in self._chunks}

    def may_share(self, level: Rank) -> bool:
        return self._cut is None or level <= self._cut.level

    def is_short(self, num_missing: int) -> bool:
        return self._cut is None or 2 * num_missing < self._cut.num_missing

    def add_chunk(self, row: int, start: int, end: int, level: Rank, *, scores: bool = False) -> None:
        """Add a chunk of a prompt; with `scores`, each position needs logits, of which a step has `max_scores`."""
        most = end - start if self.bucket else self.limits.max_chunk_tokens
        if scores:
            most = min(most, max(self._num_scores_left, 1))
            self._num_scores_left -= min(end - start, most)
        num_tokens = min(end - start, most)
        if end - start > self.token_budget <= most and not self.bucket:
            num_tokens = (self.token_budget + 1) // 2
            level = level if self._cut is None else min(level, self._cut.level)
            self._cut = SplitChunk(len(self._chunks), end - start, level, most)
        self._chunks.append(StepChunk(row, start, num_tokens, start + num_tokens == end))
        self.token_budget -= num_tokens

    def give_back(self) -> None:
        if self._cut is not None:
            position, num_missing, _, most = self._cut
            chunk = self._chunks[position]
            num_tokens = min(chunk.num_tokens + self.token_budget, num_missing, most)
            self.token_budget -= num_tokens - chunk.num_tokens
            self._chunks[position] = StepChunk(chunk.row, chunk.start, num_tokens, num_tokens == num_missing)

    def add_blocks(self, rows: Sequence[int], indices: Sequence[int], block_ids: Sequence[int]) -> None:
        self._block_rows += rows
        self._block_indices += indices
        self._block_ids += block_ids

    def to_batch(self, step_id: int, freed_rows: Int32Array, transfers: TransferArrays) -> ScheduledBatch:
        chunks = sorted(self._chunks, key=lambda chunk: chunk.num_tokens > 1)  # stable: single tokens first
        num_decodes = len(self.decode_rows)
        n = num_decodes + len(chunks)
        rows, starts = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
        counts, samples = np.ones(n, dtype=np.int32), np.ones(n, dtype=np.bool_)
        rows[:num_decodes], starts[:num_decodes] = self.decode_rows, self.decode_starts
        for index, chunk in enumerate(chunks, num_decodes):
            rows[index], starts[index], counts[index], samples[index] = chunk
        return ScheduledBatch(
            step_id=step_id,
            rows=rows,
            start_positions=starts,
            num_scheduled_tokens=counts,
            samples=samples,
            num_decodes=0 if self.bucket else num_decodes + sum([chunk.num_tokens == 1 for chunk in chunks]),
            num_tokens=num_decodes + sum([chunk.num_tokens for chunk in chunks]),
            new_rows=tuple(self.new_rows),
            freed_rows=freed_rows,
            block_rows=_ids(self._block_rows),
            block_indices=_ids(self._block_indices),
            block_ids=_ids(self._block_ids),
            transfers=transfers,
            bucket=self.bucket or "",
            draft_tokens=self._draft_tokens,
        )


def new_row(request: Request) -> NewRow:
    token_ids = request.prompt_token_ids
    if request.output_token_ids:
        token_ids = np.concatenate((token_ids, _ids(request.output_token_ids)))
    return NewRow(request.row, request, token_ids, request.row_sampling)


def _ids(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)
