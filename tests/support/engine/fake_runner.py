"""A runner without a device: a model that is a pure function of the token prefix, over a cache that tells on misuse.

It keeps its rows exactly as `ScheduledBatch` says, so it also shows that the batch protocol is enough. For every
slot it remembers which tokens, under which salt, were written there, and it checks at every step that

* rows, positions and counts are those that follow from the batches before,
* every scheduled position has a slot, no slot is written twice, and a block that is written has one holder: no other
  row, and no other row of a batch in flight, names it,
* every position that is attended to holds what belongs there: the row's own prefix under the row's own salt.

That catches wrong sharing, early frees, stale blocks and tokens that were never computed. Drafts are written and
attended to as tokens are. Those after the first wrong one are forgotten when the step ends, and so are their blocks.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tidewheel.batch import NO_DRAFT, TO_DRAFT, Int32Array, NewRow, SampledTokens, ScheduledBatch
from tidewheel.request import FinishReason, Request

VOCAB_SIZE = 40
POISON = -1


def prefix_hash(parent: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), parent)


def next_token(content: int, num_output_tokens: int, min_tokens: int, stop_token_ids: Sequence[int]) -> int:
    """Return the token after a prefix with this hash; stop ids are masked until `min_tokens` are there."""
    masked = stop_token_ids if num_output_tokens < min_tokens else ()
    candidates = ((content + offset) % VOCAB_SIZE for offset in range(VOCAB_SIZE))
    return next(token_id for token_id in candidates if token_id not in masked)


def naive_output(request: Request) -> tuple[list[int], FinishReason]:
    """Return output and end of the request, computed from scratch and alone."""
    content = 0
    for token_id in request.prompt_token_ids.tolist():
        content = prefix_hash(content, token_id)
    output: list[int] = []
    while len(output) < request.max_tokens:
        token_id = next_token(content, len(output), request.sampling.min_tokens, request.stop_token_ids)
        output.append(token_id)
        if token_id in request.stop_token_ids and len(output) >= request.sampling.min_tokens:
            return output, FinishReason.STOP
        content = prefix_hash(content, token_id)
    return output, FinishReason.LENGTH


@dataclass(eq=False)
class Row:
    """Stay of a request in a row."""

    new_row: NewRow
    salt: str
    token_ids: list[int]
    contents: list[int]  # hash of the prefix that ends with each token
    num_computed_tokens: int
    block_table: list[int] = field(default_factory=list)
    is_broken: bool = False  # its logits were not finite
    num_drafts: int = 0  # of the step, at the end of `token_ids`

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.num_drafts

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.contents.append(prefix_hash(self.contents[-1] if self.contents else 0, token_id))

    def append_draft(self, token_id: int) -> None:
        self.append(token_id)
        self.num_drafts += 1

    def forget_drafts(self) -> None:
        del self.contents[self.num_known_tokens :]
        del self.token_ids[self.num_known_tokens :]
        self.num_drafts = 0


@dataclass(eq=False)
class PendingTokens:
    runner: FakeRunner
    sampled: SampledTokens
    holders: dict[int, set[Row]]  # of the blocks that the batch names
    is_done: ClassVar[None] = None

    def wait(self) -> SampledTokens:
        """Return the tokens; batches end in the order of their launch."""
        assert self.runner.in_flight.pop(0) is self
        return self.sampled


class FakeRunner:
    """A runner over a checked cache; `salt_of` gives the salt of a request, which a device never needs."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        salt_of: Callable[[str], str] = lambda request_id: "",
    ) -> None:
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_budget = token_budget
        self.salt_of = salt_of
        self.rows: dict[int, Row] = {}
        self.slots: dict[int, tuple[str, int]] = {}  # slot → salt and prefix of what was written there last
        self.host: dict[int, list[tuple[str, int] | None]] = {}  # contents of the slots of the host tier
        self.in_flight: list[PendingTokens] = []
        self.not_finite: set[str] = set()  # ids of requests whose next logits are not finite
        self.draft_of: Callable[[Row], int] = lambda row: next_token(row.contents[-1], 0, 0, ())
        self.num_steps = 0

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        assert batch.step_id == self.num_steps
        self.num_steps += 1
        self._check_shape(batch)
        self._update_rows(batch)
        self._transfer(batch)
        sampled = self._compute(batch)
        holders: dict[int, set[Row]] = {}
        for row in map(self.rows.__getitem__, batch.rows.tolist()):
            for block_id in row.block_table:
                holders.setdefault(block_id, set()).add(row)
        pending = PendingTokens(self, sampled, holders)
        self.in_flight.append(pending)
        return pending

    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        if len(batch.draft_tokens):
            self._check_drafts(batch)
        drafts = self._append_drafts(batch)
        self._check_positions(batch)
        self._write(batch)
        self._attend(batch)
        sampled = [
            self._sample(row, end) if samples else SampledTokens.NOT_SAMPLED
            for (row, _, end), samples in zip(self._chunks(batch), batch.samples.tolist(), strict=True)
        ]
        token_ids = np.array(sampled, dtype=np.int32)
        self._append_tokens(batch, drafts, token_ids)
        drafted = drafts if (batch.draft_tokens == TO_DRAFT).any() else None
        return SampledTokens(batch.step_id, token_ids, draft_tokens=drafted)

    def _append_drafts(self, batch: ScheduledBatch) -> Int32Array:
        """Append the step's drafts to their rows, and return them by entry."""
        drafts = batch.draft_tokens.copy()
        for index in (drafts != NO_DRAFT).nonzero()[0].tolist():
            row = self.rows[int(batch.rows[index])]
            if drafts[index] == TO_DRAFT:
                drafts[index] = self.draft_of(row)
            row.append_draft(max(int(drafts[index]), 0))  # `NOT_DRAFTED`: any token
        return drafts

    def _check_shape(self, batch: ScheduledBatch) -> None:
        counts = batch.num_scheduled_tokens.tolist()
        rows = set(batch.rows.tolist())
        assert 0 < len(rows) <= self.num_rows
        assert len(batch.rows) == len(batch.start_positions) == len(counts)
        assert len(batch.draft_tokens) in (0, len(counts))
        assert len(batch.draft_tokens) or len(rows) == len(batch.rows)
        assert batch.num_tokens == sum(counts) <= self.token_budget
        assert all(count == 1 for count in counts[: batch.num_decodes])
        assert all(count > 1 for count in counts[batch.num_decodes :])
        for array in (batch.rows, batch.start_positions, batch.num_scheduled_tokens, batch.freed_rows):
            assert array.dtype == np.int32
        for array in (batch.block_rows, batch.block_indices, batch.block_ids):
            assert array.dtype == np.int32 and len(array) == len(batch.block_ids)

    def _check_drafts(self, batch: ScheduledBatch) -> None:
        """Check that a step with drafts is of decodes alone, and that the entries of each row are adjacent."""
        assert batch.num_decodes == len(batch.rows)
        assert not self.in_flight
        entries = list(
            zip(batch.rows.tolist(), batch.start_positions.tolist(), batch.draft_tokens.tolist(), strict=True)
        )
        seen: set[int] = set()
        for index, (row, position, draft) in enumerate(entries):
            if draft == NO_DRAFT:
                assert row not in seen
                seen.add(row)
            else:
                assert draft == TO_DRAFT or 0 <= draft < VOCAB_SIZE
                assert entries[index - 1][:2] == (row, position - 1), "a draft does not follow the entry before"
                limit = self.rows[row].new_row.request.max_num_tokens
                assert position + 2 <= limit, "a draft is past max_tokens"

    def _update_rows(self, batch: ScheduledBatch) -> None:
        for row_index in batch.freed_rows.tolist():
            del self.rows[row_index]
        starts = dict(zip(batch.rows.tolist(), batch.start_positions.tolist(), strict=True))
        for new in batch.new_rows:
            assert 0 <= new.row < self.num_rows and new.row not in self.rows
            assert 1 <= new.request.num_prompt_tokens <= len(new.token_ids)
            self.rows[new.row] = row = Row(new, self.salt_of(new.request.request_id), [], [], starts[new.row])
            for token_id in new.token_ids.tolist():
                row.append(token_id)
        entries = zip(batch.block_rows.tolist(), batch.block_indices.tolist(), batch.block_ids.tolist(), strict=True)
        for row_index, index, block_id in entries:
            assert 0 <= block_id < self.num_blocks
            assert index == len(self.rows[row_index].block_table)
            self.rows[row_index].block_table.append(block_id)

    def _transfer(self, batch: ScheduledBatch) -> None:
        """Move blocks out, then in, then copy; the content of a block is what its slots hold."""
        moves = batch.transfers
        for block_id, slot in zip(moves.swap_out_blocks.tolist(), moves.swap_out_slots.tolist(), strict=True):
            self.host[slot] = self._read_block(block_id)
        for slot, block_id in zip(moves.swap_in_slots.tolist(), moves.swap_in_blocks.tolist(), strict=True):
            self._write_block(block_id, self.host[slot])
        for source, target in zip(moves.copy_sources.tolist(), moves.copy_targets.tolist(), strict=True):
            self._write_block(target, self._read_block(source))

    def _read_block(self, block_id: int) -> list[tuple[str, int] | None]:
        start = block_id * self.block_size
        return [self.slots.get(slot) for slot in range(start, start + self.block_size)]

    def _write_block(self, block_id: int, contents: list[tuple[str, int] | None]) -> None:
        for slot, content in enumerate(contents, block_id * self.block_size):
            self.slots.pop(slot, None)
            if content is not None:
                self.slots[slot] = content

    def _chunks(self, batch: ScheduledBatch) -> list[tuple[Row, int, int]]:
        rows = [self.rows[row_index] for row_index in batch.rows.tolist()]
        ends = (batch.start_positions + batch.num_scheduled_tokens).tolist()
        return list(zip(rows, batch.start_positions.tolist(), ends, strict=True))

    def _check_positions(self, batch: ScheduledBatch) -> None:
        for (row, start, end), samples in zip(self._chunks(batch), batch.samples.tolist(), strict=True):
            assert start == row.num_computed_tokens
            assert start < end <= len(row.token_ids)
            assert samples == (end >= row.num_known_tokens)
            row.num_computed_tokens = end

    def _write(self, batch: ScheduledBatch) -> None:
        holders = Counter(block_id for row in self.rows.values() for block_id in row.block_table)
        written = set()
        for row, start, end in self._chunks(batch):
            for position in range(start, end):
                slot = self._slot(row, position)
                assert slot not in written, "a slot is written twice in one step"
                written.add(slot)
                block_id = slot // self.block_size
                assert holders[block_id] == 1, "a shared block is written"
                for pending in self.in_flight:
                    assert pending.holders.get(block_id, {row}) == {row}, "a block in flight is written"
                self.slots[slot] = (row.salt, row.contents[position])

    def _attend(self, batch: ScheduledBatch) -> None:
        for row, _, end in self._chunks(batch):
            for position in range(end if not row.is_broken else 0):
                content = self.slots.get(self._slot(row, position))
                assert content == (row.salt, row.contents[position]), "a slot holds something else"

    def _sample(self, row: Row, end: int) -> int:
        """Return the token after the row's first `end` tokens."""
        new = row.new_row
        if self._breaks(row, end):
            return SampledTokens.NOT_FINITE
        num_output_tokens = end - new.request.num_prompt_tokens
        return next_token(
            row.contents[end - 1], num_output_tokens, new.sampling.min_tokens, new.request.stop_token_ids
        )

    def _breaks(self, row: Row, num_tokens: int) -> bool:
        """Return whether the logits after so many tokens are not finite."""
        return row.new_row.request.request_id in self.not_finite

    def _append_tokens(self, batch: ScheduledBatch, drafts: Int32Array, token_ids: Int32Array) -> None:
        """Append to each row what it sampled, up to the first token that is not the draft."""
        chunks = self._chunks(batch)
        for index in batch.samples.nonzero()[0].tolist():
            row, start, end = chunks[index]
            if len(drafts) and drafts[index] != NO_DRAFT:
                if start != len(row.token_ids) - 1 or row.token_ids[start] != drafts[index]:
                    continue
            else:
                row.forget_drafts()
            if token_ids[index] == SampledTokens.NOT_FINITE:
                for position in range(start, end):
                    self.slots[self._slot(row, position)] = (row.salt, POISON)
                row.is_broken = True
            row.append(max(int(token_ids[index]), 0))
        if len(drafts):
            for row, _, _ in chunks:
                row.num_computed_tokens = len(row.token_ids) - 1
                del row.block_table[-(-row.num_computed_tokens // self.block_size) :]

    def _slot(self, row: Row, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size
