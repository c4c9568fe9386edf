"""Token masks of rows with grammars, computed on a thread beside the device.

A mask needs the row's token of the previous step: the thread waits for it while the mask's step runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.batch import Int32Array, NewRow, SampledTokens, ScheduledBatch
from tidewheel.runner.accelerator import CudaAccelerator


class GrammarState:
    def __init__(self, new: NewRow) -> None:
        assert new.request.grammar is not None
        compiled, self._ends = new.request.grammar
        self._end_bit = compiled.end_bit
        self.num_words = compiled.num_words
        self._stops = (*self._ends, *new.request.stop_token_ids)
        self._first_stop_position = new.request.num_prompt_tokens + new.sampling.min_tokens
        self._avoids_end = new.sampling.ignore_eos
        allowed = new.sampling.allowed_token_ids
        self._allowed = packed(allowed, self.num_words) if allowed else None
        self.matcher = compiled.matcher(new.token_ids[new.request.num_prompt_tokens :].tolist())
        self.pool = compiled.pool

    def follows(self, token_id: int) -> bool:
        """Return False for end tokens and negative ids, which the grammar does not consume."""
        return token_id >= 0 and token_id not in self._ends

    def complete(self, mask: TokenMask, position: int) -> None:
        """Add end tokens and apply `allowed_token_ids`; clear the mask of a grammar that has become too complex."""
        if self.matcher.is_error():
            mask.words[:] = 0
            return
        may_end = mask.clear(self._end_bit)
        for token_id in self._ends:
            mask.clear(token_id)
            if may_end:
                mask.set(token_id)
        if self._allowed is not None:
            mask.words[:] &= self._allowed
        avoided = self._stops if position < self._first_stop_position else self._ends if self._avoids_end else ()
        if avoided:
            self._avoid(avoided, mask)

    def _avoid(self, token_ids: Sequence[int], mask: TokenMask) -> None:
        kept = mask.words.copy()
        for token_id in token_ids:
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
    wait: Callable[[], SampledTokens]


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

    def start(self, rows: Int32Array, positions: Int32Array) -> MaskJob | None:
        """Start to compute masks in a thread; return None if no row has a grammar."""
        indices = [index for index, row in enumerate(rows.tolist()) if row in self.states]
        if not indices:
            return None
        states = [self.states[int(rows[index])] for index in indices]
        unread, self._unread = self._unread, []
        bits = self._thread.submit(self._filled, states, positions[indices].tolist(), unread)
        return MaskJob(np.array(indices, dtype=np.int32), states, bits)

    def sampled(self, job: MaskJob, batch: ScheduledBatch, wait: Callable[[], SampledTokens]) -> None:
        """Queue a step's tokens, from `wait`, for the matchers."""
        self._unread.append(_UnreadTokens(job.states, np.flatnonzero(batch.samples)[job.rows].tolist(), wait))

    def _filled(
        self, states: Sequence[GrammarState], positions: Sequence[int], unread: Sequence[_UnreadTokens]
    ) -> torch.Tensor:
        pool = states[0].pool
        for earlier in unread:
            token_ids = earlier.wait().token_ids[earlier.indices].tolist()
            pairs = zip(earlier.states, token_ids, strict=True)
            followed = [(state.matcher, token) for state, token in pairs if state.follows(token)]
            if followed:
                pool.consume_token_par(followed)
        shape = len(states), states[0].num_words
        accelerator = self._accelerator
        bits = accelerator.pinned(shape, torch.int32) if accelerator else torch.empty(shape, dtype=torch.int32)
        matchers = [(state.matcher, index) for index, state in enumerate(states)]
        pool.unsafe_compute_mask_ptr(matchers, bits.data_ptr(), 4 * shape[1], shape[0])
        for state, words, position in zip(states, bits.numpy().view(np.uint32), positions, strict=True):
            state.complete(TokenMask(words, memoryview(words)), position)
        return bits


assert sys.byteorder == "little"  # bytes of masks are words
