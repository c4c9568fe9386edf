"""The values that scheduler and runner exchange for one step.

A *row* is the index of a running request in per-request tables, in ``[0, max_num_seqs)``. The runner keeps each row's
tokens, block table and sampling state, so a batch carries only changes. It also writes sampled tokens into their rows
itself, so a step can be scheduled before the last one's tokens are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tidewheel.request import Request
    from tidewheel.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


def _no_ids() -> Int32Array:
    return np.empty(0, dtype=np.int32)


class NewRow(NamedTuple):
    """A request that takes a row, perhaps again after a preemption."""

    row: int
    request_id: str
    token_ids: Int32Array  # [num_tokens] prompt, then earlier output
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # masked until `sampling.min_tokens` are out
    bad_words_ids: tuple[tuple[int, ...], ...]  # must not be completed


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step in columns. Arrays must not be written after construction.

    Decode rows (one token) come first, then longer chunks. Row i computes positions ``[start_positions[i],
    start_positions[i] + num_scheduled_tokens[i])``.
    """

    step_id: int
    rows: Int32Array  # [n]
    start_positions: Int32Array  # [n] tokens in the KV cache
    num_scheduled_tokens: Int32Array  # [n]
    samples: BoolArray  # [n] the chunk reaches the row's last token
    num_decodes: int  # leading rows with one token
    num_tokens: int  # sum of num_scheduled_tokens
    new_rows: tuple[NewRow, ...] = ()
    freed_rows: Int32Array = field(default_factory=_no_ids)  # apply before new_rows
    block_rows: Int32Array = field(default_factory=_no_ids)  # [m] new block-table entries
    block_indices: Int32Array = field(default_factory=_no_ids)  # [m] logical
    block_ids: Int32Array = field(default_factory=_no_ids)  # [m] physical
    copy_sources: Int32Array = field(default_factory=_no_ids)  # [c] copied before the forward pass
    copy_targets: Int32Array = field(default_factory=_no_ids)  # [c]
    # Host tier, in this order: out, in, then the copies above. Blocks are in the pool, slots in host memory.
    swap_out_blocks: Int32Array = field(default_factory=_no_ids)  # [o] as earlier steps left them
    swap_out_slots: Int32Array = field(default_factory=_no_ids)  # [o]
    swap_in_slots: Int32Array = field(default_factory=_no_ids)  # [i]
    swap_in_blocks: Int32Array = field(default_factory=_no_ids)  # [i]


class TopLogprobs(NamedTuple):
    logprob: float  # of the chosen token, before temperature and truncation
    rank: int  # of the chosen token, from 1
    top_ids: tuple[int, ...]  # best first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Result of one batch, aligned with its rows."""

    NOT_SAMPLED = -1
    NOT_FINITE = -2

    step_id: int
    token_ids: Int32Array  # [n] or NOT_SAMPLED; NOT_FINITE if the logits were not
    logprobs: dict[int, TopLogprobs] | None = None  # by batch index; only rows that asked


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Result of one applied step: `requests` and one new token each."""

    requests: list[Request]
    token_ids: list[int]
    logprobs: dict[int, TopLogprobs] | None  # by index into `requests`
    finished: list[Request]  # in this step; `finish_reason` is set
