"""What a step is: the values that scheduler and runner exchange, and nothing else.

A *row* is the index of a running request in every per-request table of scheduler and runner, in
``[0, max_num_seqs)``. The runner keeps, per row, the tokens, the block table and the sampling state; a batch
carries only what changed. A token that the runner has sampled is written by the runner itself at its position
in the row, so a batch never has to carry it back: that is what lets a step be scheduled before the tokens of
the last one were read.
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
    """A request that takes a row: admitted for the first time, or again after a preemption."""

    row: int
    request_id: str
    token_ids: Int32Array  # [num_tokens] prompt, then any output it already has
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]  # masked until `sampling.min_tokens` are there
    bad_words_ids: tuple[tuple[int, ...], ...]  # token sequences that must not be completed


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step, as columns. Arrays must not be written after construction.

    n is the number of scheduled rows; decode rows (one token) come first, then longer chunks.
    Row i computes positions ``[start_positions[i], start_positions[i] + num_scheduled_tokens[i])``.
    """

    step_id: int
    rows: Int32Array  # [n]
    start_positions: Int32Array  # [n] tokens whose KV is already in the cache
    num_scheduled_tokens: Int32Array  # [n]
    samples: BoolArray  # [n] the chunk reaches the last token, so the row samples one
    num_decodes: int  # leading rows with one scheduled token
    num_tokens: int  # sum of num_scheduled_tokens
    new_rows: tuple[NewRow, ...] = ()
    freed_rows: Int32Array = field(default_factory=_no_ids)  # left since the last batch; before new_rows
    block_rows: Int32Array = field(default_factory=_no_ids)  # [m] new block-table entries: row,
    block_indices: Int32Array = field(default_factory=_no_ids)  # [m] logical index,
    block_ids: Int32Array = field(default_factory=_no_ids)  # [m] and physical block
    copy_sources: Int32Array = field(default_factory=_no_ids)  # [c] blocks to copy before the forward pass
    copy_targets: Int32Array = field(default_factory=_no_ids)  # [c]
    # The host tier, in this order: out, in, then the copies above. Block in the pool, slot in host memory.
    swap_out_blocks: Int32Array = field(default_factory=_no_ids)  # [o] as earlier steps left them
    swap_out_slots: Int32Array = field(default_factory=_no_ids)  # [o]
    swap_in_slots: Int32Array = field(default_factory=_no_ids)  # [i]
    swap_in_blocks: Int32Array = field(default_factory=_no_ids)  # [i]


class TopLogprobs(NamedTuple):
    """Log-probabilities at one sampled position."""

    logprob: float  # of the chosen token, before temperature and truncation
    rank: int  # of the chosen token, 1 = most likely
    top_ids: tuple[int, ...]  # the most likely tokens, best first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the runner answers to one `ScheduledBatch`, aligned with its rows."""

    NOT_SAMPLED = -1
    NOT_FINITE = -2

    step_id: int
    token_ids: Int32Array  # [n] NOT_SAMPLED where the row did not sample, NOT_FINITE where its logits were not finite
    logprobs: dict[int, TopLogprobs] | None = None  # by index into the batch; only rows that asked


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one applied step did to requests. `requests`, `token_ids` are aligned: one new token each."""

    requests: list[Request]
    token_ids: list[int]
    logprobs: dict[int, TopLogprobs] | None  # by index into `requests`
    finished: list[Request]  # reached their end in this step; `finish_reason` is set
