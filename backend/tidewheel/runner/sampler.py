"""Sampling on the device, and its results on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidewheel.batch import Int32Array, TopLogprobs
from tidewheel.runner.inputs import Int64Array
from tidewheel.runner.sampling_plan import SamplingPlan
from tidewheel.runner.staging import Group
from tidewheel_kernels import (
    LogprobsOutput,
    PenaltyTensors,
    SamplingTensors,
    TokenHistory,
    WordTensors,
    apply_logit_bias,
    apply_penalties,
    compute_logprobs,
    forbid_words,
    sample,
)

NUM_GROUPS = 5  # groups of sampling arrays


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors."""

    token_ids: torch.Tensor  # [S] int64, -1 for non-finite logits
    logprobs: LogprobsOutput | None  # for the plan's `logprob_rows`


def staged_groups(plan: SamplingPlan | None, num_rows: int | None = None) -> list[Group | None]:
    """Return a plan's arrays for `sample_tokens`, the draw padded to `num_rows`."""
    if plan is None:
        return [None] * NUM_GROUPS
    draw = plan.draw if num_rows is None else plan.draw.padded(num_rows)
    logprob_rows = (plan.logprob_rows,) if len(plan.logprob_rows) else None
    return [draw, plan.bias, plan.words, plan.penalties, logprob_rows]


def draw_tokens(logits: torch.Tensor, draw: Sequence[torch.Tensor], *, any_sampled: bool) -> torch.Tensor:
    """Return token ids as in `Sampled`, greedy or with all filters, without host values."""
    temperature, top_k, top_p, min_p, uniform = draw
    flags = (any_sampled,) * 4
    return sample(logits, SamplingTensors(temperature, top_k, top_p, min_p, *flags), uniform).token_ids


def sample_tokens(
    logits: torch.Tensor, plan: SamplingPlan, staged: Sequence[Sequence[torch.Tensor]], history: TokenHistory
) -> Sampled:
    """Sample one token per row of `logits` [S, V], which it may overwrite.

    vLLM's order: model log-probabilities; then biases and forbidden tokens, penalties, temperature, top_k, top_p,
    min_p, and the draw.
    """
    draw, bias, words, penalties, logprob_rows = staged
    if plan.changes_logits and logits.dtype != torch.float32:
        logits = logits.float()
    raw = logits
    if logprob_rows:
        raw = logits.index_select(0, logprob_rows[0])
    if plan.bias is not None:
        apply_logit_bias(logits, *bias)
    if plan.words is not None:
        forbid_words(logits, history, WordTensors(*words))
    if plan.penalties is not None:
        longest = int(plan.penalties.num_tokens.max())
        apply_penalties(logits, history, PenaltyTensors(longest, *penalties))
    temperature, top_k, top_p, min_p, uniform = draw
    tensors = SamplingTensors(
        temperature, top_k, top_p, min_p, plan.any_sampled, plan.any_top_k, plan.any_top_p, plan.any_min_p
    )
    token_ids = sample(logits, tensors, uniform).token_ids
    if not logprob_rows:
        return Sampled(token_ids, None)
    num_top = int(plan.num_top_logprobs.max())
    return Sampled(token_ids, compute_logprobs(raw, token_ids.index_select(0, logprob_rows[0]), num_top))


def top_logprobs(
    output: LogprobsOutput, num_top: Int32Array, batch_indices: Int64Array, token_ids: Int32Array
) -> dict[int, TopLogprobs]:
    """Return log-probabilities by batch index, without rows with negative `token_ids`."""
    logprobs, ranks = output.logprobs.tolist(), output.ranks.tolist()
    ids, values = output.top_token_ids.tolist(), output.top_logprobs.tolist()
    return {
        index: TopLogprobs(logprobs[i], ranks[i], tuple(ids[i][:count]), tuple(values[i][:count]))
        for i, (index, count) in enumerate(zip(batch_indices.tolist(), num_top.tolist(), strict=True))
        if token_ids[i] >= 0
    }
