"""A runner without a device: a model that is a pure function of the token prefix, over a cache that tells on misuse.

It keeps its rows exactly as `ScheduledBatch` says, so it also shows that the batch protocol is enough. For every
slot it remembers which tokens, under which salt, were written there, and it checks at every step that

* rows, positions and counts are those that follow from the batches before,
* every scheduled position has a slot, no slot is written twice, and a block that is written has one holder: no other
  row, and no other row of a batch in flight, names it,
* every position that is attended to holds what belongs there: the row's own prefix under the row's own salt.

That catches wrong sharing, early frees, stale blocks and tokens that were never computed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from tidewheel.batch import NewRow, SampledTokens, ScheduledBatch
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

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.contents.append(prefix_hash(self.contents[-1] if self.contents else 0, token_id))


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
        self._check_positions(batch)
        self._write(batch)
        self._attend(batch)
        token_ids = np.array([self._sample(batch, index) for index in range(len(batch.rows))], dtype=np.int32)
        return SampledTokens(batch.step_id, token_ids)

    def _check_shape(self, batch: ScheduledBatch) -> None:
        counts = batch.num_scheduled_tokens.tolist()
        assert 0 < len(batch.rows) <= self.num_rows
        assert len(set(batch.rows.tolist())) == len(batch.rows) == len(batch.start_positions) == len(counts)
        assert batch.num_tokens == sum(counts) <= self.token_budget
        assert all(count == 1 for count in counts[: batch.num_decodes])
        assert all(count > 1 for count in counts[batch.num_decodes :])
        for array in (batch.rows, batch.start_positions, batch.num_scheduled_tokens, batch.freed_rows):
            assert array.dtype == np.int32
        for array in (batch.block_rows, batch.block_indices, batch.block_ids):
            assert array.dtype == np.int32 and len(array) == len(batch.block_ids)

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
            assert samples == (end == len(row.token_ids))
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

    def _sample(self, batch: ScheduledBatch, index: int) -> int:
        if not batch.samples[index]:
            return SampledTokens.NOT_SAMPLED
        row = self.rows[int(batch.rows[index])]
        new = row.new_row
        if new.request.request_id in self.not_finite:
            start = int(batch.start_positions[index])
            for position in range(start, row.num_computed_tokens):
                self.slots[self._slot(row, position)] = (row.salt, POISON)
            row.is_broken = True
            row.append(0)
            return SampledTokens.NOT_FINITE
        num_output_tokens = len(row.token_ids) - new.request.num_prompt_tokens
        token_id = next_token(
            row.contents[-1], num_output_tokens, new.sampling.min_tokens, new.request.stop_token_ids
        )
        row.append(token_id)
        return token_id

    def _slot(self, row: Row, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size
