from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidewheel.batch import Float32Array, Int32Array, Launch, SampledTokens, ScheduledBatch
from tidewheel.runner.accelerator import Accelerator, DeviceEvent
from tidewheel.runner.sampling_plan import SCORED_AT_ONCE, PoolingPlan, PromptScoring, SamplingPlan
from tidewheel.runner.staging import DeviceArrays
from tidewheel.sampling import TopLogprobs
from tidewheel_kernels import (
    LogprobsOutput,
    PenaltyTensors,
    SamplingTensors,
    TokenHistory,
    WordTensors,
    apply_logit_bias,
    apply_penalties,
    apply_token_mask,
    compute_logprobs,
    forbid_words,
    sample,
)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Device tensors of S sampled rows."""

    token_ids: torch.Tensor | None  # [S] int64, -1: non-finite logits; None: no row samples
    logprobs: LogprobsOutput | None = None  # of the plan's `logprob_rows`
    prompt_logprobs: LogprobsOutput | None = None  # of the scored positions
    pooled: torch.Tensor | None = None  # [R, hidden_size] float32


def draw_tokens(logits: torch.Tensor, draw: Sequence[torch.Tensor], flags: Sequence[bool]) -> torch.Tensor:
    """Return ids [S] int64 without reading device values; `flags`: those of `SamplingTensors`."""
    temperature, top_k, top_p, min_p, uniform = draw
    return sample(logits, SamplingTensors(temperature, top_k, top_p, min_p, *flags), uniform).token_ids


def sample_tokens(
    logits: torch.Tensor, plan: SamplingPlan, sent: DeviceArrays, history: TokenHistory
) -> SamplerOutput:
    """Sample a token per row of `logits` [S, V], which it may overwrite.

    Order of vLLM: log-probabilities, allowed tokens, biases, forbidden words, penalties, grammar masks, temperature,
    top_k, top_p, min_p, draw.
    """
    if plan.changes_logits and logits.dtype != torch.float32:
        logits = logits.float()
    logprob_rows = sent.group("logprob_rows")
    raw = logits.index_select(0, logprob_rows[0]) if logprob_rows else logits
    if plan.allowed is not None:
        rows, words = sent.group("allowed")
        apply_token_mask(logits, rows, words.view(len(rows), -1))
    if plan.bias is not None:
        apply_logit_bias(logits, *sent.group("bias"))
    if plan.words is not None:
        forbid_words(logits, history, WordTensors(*sent.group("words")))
    if plan.penalties is not None:
        longest = int(plan.penalties.num_tokens.max())
        apply_penalties(logits, history, PenaltyTensors(longest, *sent.group("penalties")))
    if plan.masks is not None:
        bits = plan.masks.bits.result().to(logits.device, non_blocking=True)
        apply_token_mask(logits, sent.group("mask_rows")[0], bits)
    flags = (plan.any_sampled, plan.any_top_k, plan.any_top_p, plan.any_min_p)
    token_ids = draw_tokens(logits, sent.group("draw"), flags)
    if not logprob_rows:
        return SamplerOutput(token_ids)
    num_top = int(plan.num_top_logprobs.max())
    return SamplerOutput(token_ids, compute_logprobs(raw, token_ids.index_select(0, logprob_rows[0]), num_top))


def score_prompts(
    states: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    token_ids: torch.Tensor,
    scoring: PromptScoring,
) -> LogprobsOutput:
    """Return log-probabilities [P]; `logits_of` maps a slice of `states` [P, …] to logits."""
    num_top = int(scoring.num_top.max())
    slices = zip(*(torch.split(tensor, SCORED_AT_ONCE) for tensor in (states, token_ids)), strict=True)
    outputs = [compute_logprobs(logits_of(some), tokens, num_top) for some, tokens in slices]
    return LogprobsOutput(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))


def pool_states(states: torch.Tensor, owners: torch.Tensor, pooling: PoolingPlan) -> torch.Tensor:
    """Return sums [R, hidden_size] float32 of states [P, hidden_size] by owner."""
    sums = torch.zeros(len(pooling.batch_indices), states.shape[1], dtype=torch.float32, device=states.device)
    return sums.index_add_(0, owners, states.float())


class PendingStep:
    """Launched step. Copies to the host are queued at once: the next step may overwrite its tensors."""

    def __init__(
        self,
        batch: ScheduledBatch,
        plan: SamplingPlan | None = None,
        sampled: SamplerOutput | None = None,
        accelerator: Accelerator | None = None,
        scoring: PromptScoring | None = None,
        pooling: PoolingPlan | None = None,
        launch: Launch = "eager",
    ) -> None:
        self._batch = batch
        self._launch = launch
        self._plan = plan
        self._scoring = scoring
        self._pooling = pooling
        self._result: SampledTokens | None = None
        self._copied: DeviceEvent | None = None
        self._sampled = sampled or SamplerOutput(None)
        if sampled is not None and accelerator is not None:
            self._sampled = _host_copies(sampled, accelerator)
            self._copied = accelerator.event()
            self._copied.record()

    def wait(self) -> SampledTokens:
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._result = self._collected()
        return self._result

    def _collected(self) -> SampledTokens:
        batch, plan, sampled = self._batch, self._plan, self._sampled
        token_ids = np.full(len(batch.rows), SampledTokens.NOT_SAMPLED, dtype=np.int32)
        others = self._prompt_logprobs(sampled.prompt_logprobs), self._pooled(sampled.pooled)
        if plan is None or sampled.token_ids is None:
            return SampledTokens(batch.step_id, token_ids, None, *others, self._launch)
        sampling = np.flatnonzero(batch.samples)
        drawn = sampled.token_ids.numpy().astype(np.int32)
        token_ids[sampling] = np.where(drawn < 0, SampledTokens.NOT_FINITE, drawn)
        if sampled.logprobs is None:
            return SampledTokens(batch.step_id, token_ids, None, *others, self._launch)
        rows = plan.logprob_rows
        pairs = zip(sampling[rows].tolist(), _top_logprobs(sampled.logprobs, plan.num_top_logprobs), strict=True)
        logprobs = {index: entry for index, entry in pairs if token_ids[index] >= 0}
        return SampledTokens(batch.step_id, token_ids, logprobs, *others, self._launch)

    def _pooled(self, states: torch.Tensor | None) -> dict[int, Float32Array] | None:
        if states is None or self._pooling is None:
            return None
        return dict(zip(self._pooling.batch_indices.tolist(), states.numpy(), strict=True))

    def _prompt_logprobs(self, output: LogprobsOutput | None) -> dict[int, list[TopLogprobs]] | None:
        scoring = self._scoring
        if output is None or scoring is None:
            return None
        entries = iter(_top_logprobs(output, np.repeat(scoring.num_top, scoring.counts)))
        counts = zip(scoring.batch_indices.tolist(), scoring.counts.tolist(), strict=True)
        return {index: list(itertools.islice(entries, count)) for index, count in counts}


def _host_copies(sampled: SamplerOutput, accelerator: Accelerator) -> SamplerOutput:
    def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _host_copy(tensor, accelerator)

    def all_copied(output: LogprobsOutput | None) -> LogprobsOutput | None:
        return None if output is None else LogprobsOutput(*(_host_copy(tensor, accelerator) for tensor in output))

    logprobs, of_prompts = all_copied(sampled.logprobs), all_copied(sampled.prompt_logprobs)
    return SamplerOutput(copied(sampled.token_ids), logprobs, of_prompts, copied(sampled.pooled))


def _host_copy(tensor: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    return accelerator.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def _top_logprobs(output: LogprobsOutput, num_top: Int32Array) -> list[TopLogprobs]:
    logprobs, ranks = output.logprobs.tolist(), output.ranks.tolist()
    ids, values = output.top_token_ids.tolist(), output.top_logprobs.tolist()
    return [
        TopLogprobs(logprobs[i], ranks[i], tuple(ids[i][:count]), tuple(values[i][:count]))
        for i, count in enumerate(num_top.tolist())
    ]
