"""From logits to tokens on the device: the order of the stages, and what comes back to the host."""

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

NUM_GROUPS = 5  # of arrays that sampling has on the device


@dataclass(frozen=True, slots=True)
class Sampled:
    """On the device."""

    token_ids: torch.Tensor  # [S] int64, -1 where the logits were not finite
    logprobs: LogprobsOutput | None  # of the rows that the plan names


def staged_groups(plan: SamplingPlan | None, num_rows: int | None = None) -> list[Group | None]:
    """The arrays of a plan that `sample_tokens` wants on the device, in its order, those of the draw padded to
    `num_rows`."""
    if plan is None:
        return [None] * NUM_GROUPS
    draw = plan.draw if num_rows is None else plan.draw.padded(num_rows)
    logprob_rows = (plan.logprob_rows,) if len(plan.logprob_rows) else None
    return [draw, plan.bias, plan.words, plan.penalties, logprob_rows]


def draw_tokens(logits: torch.Tensor, draw: Sequence[torch.Tensor], *, any_sampled: bool) -> torch.Tensor:
    """[S] int64, as `Sampled` has them: greedy, or with every filter on. Nothing depends on values of the host."""
    temperature, top_k, top_p, min_p, uniform = draw
    flags = (any_sampled,) * 4
    return sample(logits, SamplingTensors(temperature, top_k, top_p, min_p, *flags), uniform).token_ids


def sample_tokens(
    logits: torch.Tensor, plan: SamplingPlan, staged: Sequence[Sequence[torch.Tensor]], history: TokenHistory
) -> Sampled:
    """Samples one token for each row of `logits` [S, V], which it may overwrite.

    The order is vLLM's: log-probabilities are those of the model; then biases and forbidden tokens, penalties,
    temperature, top_k, top_p, min_p, and the draw.
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
    """Host values by index into the batch; `token_ids` are those sampled there, rows without one are left out."""
    logprobs, ranks = output.logprobs.tolist(), output.ranks.tolist()
    ids, values = output.top_token_ids.tolist(), output.top_logprobs.tolist()
    return {
        index: TopLogprobs(logprobs[i], ranks[i], tuple(ids[i][:count]), tuple(values[i][:count]))
        for i, (index, count) in enumerate(zip(batch_indices.tolist(), num_top.tolist(), strict=True))
        if token_ids[i] >= 0
    }
