"""Recovery of a step: run it again without a row that failed, or, short of memory, without its longest chunk.

One request ends, the others continue. A repeated step writes the same keys and values into the same slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from tidewheel.batch import BoolArray, RowError, SampledTokens, ScheduledBatch

MAX_GIVEN_UP = 3  # requests

T = TypeVar("T")


class Failure(NamedTuple):
    """Failed attempt, which raises if it is waited for like a launch."""

    error: Exception

    def wait(self) -> NoReturn:
        raise self.error


def attempt(work: Callable[[], T]) -> T | Failure:
    """Raise other errors than a row's and lack of memory."""
    try:
        return work()
    except Exception as error:
        if not isinstance(error, RowError) and not is_out_of_memory(error):
            raise
        return Failure(error.with_traceback(None))  # its frames hold tensors


def is_out_of_memory(error: BaseException) -> bool:
    """Go by names, because this layer imports no torch. On a CPU its allocator raises a plain `RuntimeError`."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def recover(
    run: Callable[[ScheduledBatch], SampledTokens],
    batch: ScheduledBatch,
    failure: Failure,
    give_up: Callable[[int, Exception], None],
) -> SampledTokens:
    """Run the batch without the rows given up, and return its tokens. Raise the error if that does not help."""
    keep = np.ones(len(batch.rows), dtype=np.bool_)
    for _ in range(MAX_GIVEN_UP):
        error = failure.error
        is_culprit = batch.rows == error.row if isinstance(error, RowError) else keep * batch.num_scheduled_tokens
        culprit = int(np.argmax(is_culprit))
        keep[culprit] = False
        give_up(int(batch.rows[culprit]), error)
        if not keep.any():
            return no_tokens(batch)
        result = attempt(lambda: run(_only(batch, keep)))
        if not isinstance(result, Failure):
            return _spread(batch, keep, result)
        failure = result
    raise failure.error


def no_tokens(batch: ScheduledBatch) -> SampledTokens:
    return SampledTokens(batch.step_id, np.full(len(batch.rows), SampledTokens.NOT_FINITE, dtype=np.int32))


def _only(batch: ScheduledBatch, keep: BoolArray) -> ScheduledBatch:
    """Keep some rows. Blocks are not copied again, because they may hold other data by now."""
    none = np.empty(0, dtype=np.int32)
    dropped = set(batch.rows[~keep].tolist())
    return dataclasses.replace(
        batch,
        new_rows=tuple(new for new in batch.new_rows if new.row not in dropped),
        rows=batch.rows[keep],
        start_positions=batch.start_positions[keep],
        num_scheduled_tokens=batch.num_scheduled_tokens[keep],
        samples=batch.samples[keep],
        num_decodes=int(keep[: batch.num_decodes].sum()),
        num_tokens=int(batch.num_scheduled_tokens[keep].sum()),
        copy_sources=none,
        copy_targets=none,
        swap_out_blocks=none,
        swap_out_slots=none,
        swap_in_slots=none,
        swap_in_blocks=none,
    )


def _spread(batch: ScheduledBatch, keep: BoolArray, tokens: SampledTokens) -> SampledTokens:
    """Align tokens with the whole batch."""
    token_ids = np.full(len(keep), SampledTokens.NOT_FINITE, dtype=np.int32)
    token_ids[keep] = tokens.token_ids
    indices = np.flatnonzero(keep).tolist()
    logprobs = tokens.logprobs and {indices[index]: value for index, value in tokens.logprobs.items()}
    of_prompts = tokens.prompt_logprobs and {indices[i]: value for i, value in tokens.prompt_logprobs.items()}
    pooled = tokens.pooled and {indices[i]: value for i, value in tokens.pooled.items()}
    return SampledTokens(batch.step_id, token_ids, logprobs, of_prompts, pooled)
