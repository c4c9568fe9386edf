"""Values that scheduler and runner exchange in a step.

A *row*, the index of a running sequence, is in ``[0, max_num_seqs)``. The runner keeps each row's tokens, block table
and sampling state; a batch carries only changes.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.lora import LoraLoad
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams, TopLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
RowArray = npt.NDArray[np.intp]  # indexes several times faster than int32
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
WeightVariant = Literal["full", "quantized"]
Launch = Literal["eager", "graph", "graphs of pieces"]  # how a step ran: pieces are what lies between attentions

# Values of `ScheduledBatch.draft_tokens` beside token ids.
NO_DRAFT = -1
TO_DRAFT = -2  # the runner's own drafter fills it in
NOT_DRAFTED = -3  # in `SampledTokens.draft_tokens`: the drafter had none
SPARE_LOGITS = 64  # of a step, for drafts or scored prompts, beside one for each row


def no_ids() -> Int32Array:
    return np.empty(0, dtype=np.int32)


class NewRow(NamedTuple):
    """Request that takes a row, at its start or after a preemption."""

    row: int
    request: Request  # only its constant parts: the scheduler goes on to change it
    token_ids: Int32Array  # [num_tokens] prompt, then output so far
    sampling: SamplingParams


class TransferArrays(NamedTuple):
    """Block copies before the forward pass of a batch: to the host tier, from there, then inside the cache."""

    copy_sources: Int32Array  # [c]
    copy_targets: Int32Array  # [c]
    swap_out_blocks: Int32Array  # [o]
    swap_out_slots: Int32Array  # [o]
    swap_in_slots: Int32Array  # [i]
    swap_in_blocks: Int32Array  # [i]


NO_TRANSFERS = TransferArrays(*[no_ids()] * 6)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step, as columns that must not be written.

    n entries: decodes (one token) first, then longer chunks. Entry i computes positions
    ``[start_positions[i], start_positions[i] + num_scheduled_tokens[i])`` of its row. A row with k draft tokens has
    k more decodes, at the positions after its first, each with a draft as input.
    """

    step_id: int
    rows: Int32Array  # [n]
    start_positions: Int32Array  # [n] tokens with KV in the cache
    num_scheduled_tokens: Int32Array  # [n]
    samples: BoolArray  # [n] true if the chunk reaches the last token, or a draft
    num_decodes: int
    num_tokens: int  # sum of num_scheduled_tokens
    new_rows: tuple[NewRow, ...] = ()
    freed_rows: Int32Array = field(default_factory=no_ids)  # left since the last batch; applied before new_rows
    block_rows: Int32Array = field(default_factory=no_ids)  # [m] new block-table entries: row,
    block_indices: Int32Array = field(default_factory=no_ids)  # [m] logical index,
    block_ids: Int32Array = field(default_factory=no_ids)  # [m] and physical block
    transfers: TransferArrays = NO_TRANSFERS
    weights: WeightVariant = "full"
    bucket: str = ""  # of requests without text
    lora_slots: Int32Array = field(default_factory=no_ids)  # [n] or `NO_SLOT`; empty: no row has an adapter
    lora_loads: tuple[LoraLoad, ...] = ()  # before the forward pass
    draft_tokens: Int32Array = field(default_factory=no_ids)  # [n] input, `TO_DRAFT` or `NO_DRAFT`; empty: no drafts

    @classmethod
    def of(
        cls, rows: Int32Array, starts: Int32Array, counts: Int32Array, samples: BoolArray, **columns: Any
    ) -> "ScheduledBatch":
        """Return a step that no scheduler planned. Its first chunks of one token are decodes."""
        num_decodes = int(np.cumprod(counts == 1).sum())
        return cls(0, rows, starts, counts, samples, num_decodes, int(counts.sum()), **columns)


class RowError(Exception):
    """Failure of one row's parameters at a launch; the step may be repeated without the row."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} cannot be launched")
        self.row = row


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens and log-probabilities of a step, aligned with the entries of its `ScheduledBatch`."""

    NOT_SAMPLED = -1
    NOT_FINITE = -2

    step_id: int
    token_ids: Int32Array  # [n] NOT_SAMPLED for entries without a sample, NOT_FINITE for non-finite logits
    logprobs: dict[int, TopLogprobs] | None = None  # by index into the batch; only rows that asked
    prompt_logprobs: dict[int, list[TopLogprobs]] | None = None  # of the tokens after the chunk, by index
    pooled: dict[int, Float32Array] | None = None  # [hidden_size] of the chunk, by index
    launch: Launch = "eager"
    draft_tokens: Int32Array | None = None  # [n] of a batch with `TO_DRAFT`: what the runner drafted
    has_caught_up: bool = False  # a draft model also read many tokens that it lacked


def accepted(draft_tokens: Int32Array, token_ids: Int32Array) -> BoolArray:
    """Return which entries' tokens are those that plain decodes would sample [n].

    A draft is accepted if it, and every draft before it in its row, is the token sampled at the entry before.
    """
    is_first = draft_tokens == NO_DRAFT
    agrees = is_first.copy()
    agrees[1:] |= (draft_tokens[1:] == token_ids[:-1]) & (draft_tokens[1:] >= 0)
    num_wrong = np.cumsum(~agrees)
    firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
    counts: BoolArray = num_wrong == num_wrong[firsts]
    return counts


@dataclass(frozen=True, slots=True)
class StepOutputs:
    requests: list[Request]  # a row with accepted drafts repeats its request
    token_ids: Int32Array  # one for each of `requests`
    logprobs: dict[int, TopLogprobs] | None  # by index into `requests`
    finished: list[Request]
