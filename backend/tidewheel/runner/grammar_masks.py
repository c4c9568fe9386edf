"""Token masks of rows with grammars, computed on a thread beside the device.

A mask needs the row's token of the previous step: the thread waits for it while the mask's step runs. The mask of a
drafted entry is that after the row's drafts up to it.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.batch import NO_DRAFT, Int32Array, NewRow, SampledTokens, ScheduledBatch, accepted
from tidewheel.runner.accelerator import CudaAccelerator


class GrammarState:
    def __init__(self, new: NewRow) -> None:
        assert new.request.grammar is not None
        self.compiled, self._ends = new.request.grammar
        self._stops = (*self._ends, *new.request.stop_token_ids)
        self._first_stop_position = new.request.num_prompt_tokens + new.sampling.min_tokens
        self._avoids_end = new.sampling.ignore_eos
        allowed = new.sampling.allowed_token_ids
        self._allowed = packed(allowed, self.compiled.num_words) if allowed else None
        self._consumed: list[int] = new.token_ids[new.request.num_prompt_tokens :].tolist()
        self.matcher = self.compiled.matcher(self._consumed)

    def _follows(self, token_id: int) -> bool:
        """Return False for end tokens and negative ids, which the grammar does not consume."""
        return token_id >= 0 and token_id not in self._ends

    def takes(self, token_id: int) -> bool:
        """Return whether the matcher shall consume a token of the answer, and note it."""
        if follows := self._follows(token_id):
            self._consumed.append(token_id)
        return follows

    def allowed(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first that the grammar forbids or does not consume."""
        drafts = list(itertools.takewhile(self._follows, drafts))
        return drafts[: self.matcher.validate_tokens(drafts)] if drafts else []

    def take_back(self, num_drafts: int) -> None:
        """Undo the consumption of drafts, after which the matcher may have failed."""
        if num_drafts and not self.matcher.rollback(num_drafts):
            self.matcher = self.compiled.matcher(self._consumed)

    def complete(self, mask: "TokenMask", position: int) -> None:
        """Add end tokens and apply `allowed_token_ids`; clear the mask of a grammar that has become too complex."""
        if self.matcher.is_error():
            mask.words[:] = 0
            return
        may_end = mask.clear(self.compiled.end_bit)
        for token_id in self._ends:
            mask.clear(token_id)
            if may_end:
                mask.set(token_id)
        if self._allowed is not None:
            mask.words[:] &= self._allowed
        avoided = self._stops if position < self._first_stop_position else self._ends if self._avoids_end else ()
        if avoided:
            kept = mask.words.copy()
            for token_id in avoided:
                mask.clear(token_id)
            if not mask.words.any():
                mask.words[:] = kept


class TokenMask(NamedTuple):
    words: npt.NDArray[np.uint32]
    view: memoryview  # faster for single words

    def clear(self, bit: int) -> bool:
        word, flag = bit >> 5, 1 << (bit & 31)
        was_set = bool(self.view[word] & flag)
        if was_set:
            self.view[word] ^= flag
        return was_set

    def set(self, bit: int) -> None:
        self.view[bit >> 5] |= 1 << (bit & 31)


def packed(token_ids: Sequence[int], num_words: int) -> npt.NDArray[np.uint32]:
    """Return the token ids as a bit set [num_words] uint32."""
    ids = np.array(token_ids, dtype=np.uint32)
    words = np.zeros(num_words, dtype=np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31))
    return words


class MaskJob(NamedTuple):
    rows: Int32Array  # [N] sampling rows
    states: list[GrammarState]
    bits: Future[torch.Tensor]  # [N, words] int32 on the host


class _UnreadTokens(NamedTuple):
    states: list[GrammarState]
    indices: list[int]  # of the tokens in the batch
    drafts: Int32Array  # of the batch
    wait: Callable[[], SampledTokens]

    def consume(self) -> None:
        """Let the matchers consume the accepted tokens."""
        token_ids = self.wait().token_ids
        if len(self.drafts):
            token_ids = np.where(accepted(self.drafts, token_ids), token_ids, SampledTokens.NOT_SAMPLED)
        pairs = zip(self.states, token_ids[self.indices].tolist(), strict=True)
        work = [(state.matcher, token) for state, token in pairs if state.takes(token)]
        if len(self.drafts):  # a matcher may have several tokens
            for matcher, token in work:
                matcher.consume_token(token)
        elif work:
            self.states[0].compiled.pool.consume_token_par(work)


class _RowMasks(NamedTuple):
    state: GrammarState
    first: int  # mask of the row's first entry
    drafts: list[int]  # that the grammar allows


def _rows_of(states: Sequence[GrammarState], drafts: Sequence[int]) -> list[_RowMasks]:
    """Group entries by row. `drafts` [N]: of the entries."""
    firsts = [index for index, draft in enumerate(drafts) if draft == NO_DRAFT]
    bounds = itertools.pairwise([*firsts, len(drafts)])
    return [_RowMasks(states[first], first, states[first].allowed(drafts[first + 1 : end])) for first, end in bounds]


class GrammarRows:
    def __init__(self, accelerator: CudaAccelerator | None) -> None:
        self._accelerator = accelerator
        self.states: dict[int, GrammarState] = {}
        self._unread: list[_UnreadTokens] = []  # steps whose tokens no matcher has consumed
        self._thread = ThreadPoolExecutor(1, "masks")

    def leave(self, row: int) -> None:
        self.states.pop(row, None)
        if not self.states:
            self._unread.clear()

    def enter(self, new: NewRow) -> None:
        self.leave(new.row)
        if new.request.grammar is not None:
            self.states[new.row] = GrammarState(new)

    def start(self, batch: ScheduledBatch, positions: Int32Array) -> MaskJob | None:
        """Start to compute masks in a thread; return None if no row has a grammar. `positions`: of new tokens [N]."""
        rows = batch.rows[batch.samples].tolist()
        indices = [index for index, row in enumerate(rows) if row in self.states]
        if not indices:
            return None
        states = [self.states[rows[index]] for index in indices]
        drafts = [NO_DRAFT] * len(indices)
        if len(batch.draft_tokens):
            drafts = batch.draft_tokens[batch.samples][indices].tolist()
        unread, self._unread = self._unread, []
        bits = self._thread.submit(self._filled, states, positions[indices].tolist(), drafts, unread)
        return MaskJob(np.array(indices, dtype=np.int32), states, bits)

    def sampled(self, job: MaskJob, batch: ScheduledBatch, wait: Callable[[], SampledTokens]) -> None:
        """Queue a step's tokens, from `wait`, for the matchers."""
        indices = np.flatnonzero(batch.samples)[job.rows].tolist()
        self._unread.append(_UnreadTokens(job.states, indices, batch.draft_tokens, wait))

    def _filled(
        self,
        states: Sequence[GrammarState],
        positions: Sequence[int],
        drafts: Sequence[int],
        unread: Sequence[_UnreadTokens],
    ) -> torch.Tensor:
        for earlier in unread:
            earlier.consume()
        shape, pool = (len(states), states[0].compiled.num_words), states[0].compiled.pool
        accelerator = self._accelerator
        bits = accelerator.pinned(shape, torch.int32) if accelerator else torch.empty(shape, dtype=torch.int32)
        rows = _rows_of(states, drafts)
        if len(rows) < len(states):
            bits.zero_()  # no mask is computed after a draft that the grammar forbids
        masks, left, offset = bits.numpy().view(np.uint32), rows, 0
        while left:
            matchers = [(state.matcher, first + offset) for state, first, _ in left]
            pool.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), 4 * shape[1], shape[0])
            for state, first, _ in left:
                words = masks[first + offset]
                state.complete(TokenMask(words, memoryview(words)), positions[first + offset])
            left = [row for row in left if offset < len(row.drafts) and not row.state.matcher.is_error()]
            if left:
                pool.consume_token_par([(row.state.matcher, row.drafts[offset]) for row in left])
            offset += 1
        for row in rows:
            row.state.take_back(len(row.drafts))
        return bits


assert sys.byteorder == "little"  # bytes of masks are words
