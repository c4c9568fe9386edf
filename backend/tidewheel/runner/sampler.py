"""Sampling on the device, and its results on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidewheel.batch import Int32Array, Int64Array, SampledTokens, ScheduledBatch, TopLogprobs
from tidewheel.runner.accelerator import Accelerator, Event
from tidewheel.runner.sampling_plan import SamplingPlan
from tidewheel.runner.staging import Sent
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
class Sampled:
    """Device tensors."""

    token_ids: torch.Tensor  # [S] int64, -1 for non-finite logits
    logprobs: LogprobsOutput | None = None  # for the plan's `logprob_rows`


def draw_tokens(logits: torch.Tensor, draw: Sequence[torch.Tensor], flags: Sequence[bool]) -> torch.Tensor:
    """Return token ids as in `Sampled`, without host values; `flags` are those of `SamplingTensors`."""
    temperature, top_k, top_p, min_p, uniform = draw
    return sample(logits, SamplingTensors(temperature, top_k, top_p, min_p, *flags), uniform).token_ids


def sample_tokens(logits: torch.Tensor, plan: SamplingPlan, sent: Sent, history: TokenHistory) -> Sampled:
    """Sample one token per row of `logits` [S, V], which it may overwrite.

    vLLM's order: model log-probabilities; then biases and forbidden tokens, penalties, masks, temperature, top_k,
    top_p, min_p, and the draw.
    """
    if plan.changes_logits and logits.dtype != torch.float32:
        logits = logits.float()
    logprob_rows = sent.group("logprob_rows")
    raw = logits.index_select(0, logprob_rows[0]) if logprob_rows else logits
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
        return Sampled(token_ids)
    num_top = int(plan.num_top_logprobs.max())
    return Sampled(token_ids, compute_logprobs(raw, token_ids.index_select(0, logprob_rows[0]), num_top))


class PendingTokens:
    """Tokens of one batch, whose copies to the host are queued at once: the next step may overwrite them."""

    def __init__(
        self,
        batch: ScheduledBatch,
        plan: SamplingPlan | None = None,
        sampled: Sampled | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._batch = batch
        self._plan = plan
        self._result: SampledTokens | None = None
        self._copies: list[torch.Tensor] = []
        self._copied: Event | None = None
        if sampled is not None:
            self._copies = [sampled.token_ids, *(sampled.logprobs or ())]
        if sampled is not None and accelerator is not None:
            self._copies = [_host_copy(tensor, accelerator) for tensor in self._copies]
            self._copied = accelerator.event()
            self._copied.record()

    def wait(self) -> SampledTokens:
        """Wait for the device and return the tokens."""
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._result = self._collected()
        return self._result

    def _collected(self) -> SampledTokens:
        batch, plan = self._batch, self._plan
        token_ids = np.full(len(batch.rows), SampledTokens.NOT_SAMPLED, dtype=np.int32)
        if plan is None:
            return SampledTokens(batch.step_id, token_ids)
        sampling = np.flatnonzero(batch.samples)
        drawn = self._copies[0].numpy().astype(np.int32)
        token_ids[sampling] = np.where(drawn < 0, SampledTokens.NOT_FINITE, drawn)
        if not len(plan.logprob_rows):
            return SampledTokens(batch.step_id, token_ids)
        rows = plan.logprob_rows
        output = LogprobsOutput(*self._copies[1:])
        logprobs = _top_logprobs(output, plan.num_top_logprobs, sampling[rows], drawn[rows])
        return SampledTokens(batch.step_id, token_ids, logprobs)


def _host_copy(tensor: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    return accelerator.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def _top_logprobs(
    output: LogprobsOutput, num_top: Int32Array, batch_indices: Int64Array, token_ids: Int32Array
) -> dict[int, TopLogprobs]:
    """Return log-probabilities by batch index, without rows of non-finite logits."""
    logprobs, ranks = output.logprobs.tolist(), output.ranks.tolist()
    ids, values = output.top_token_ids.tolist(), output.top_logprobs.tolist()
    return {
        index: TopLogprobs(logprobs[i], ranks[i], tuple(ids[i][:count]), tuple(values[i][:count]))
        for i, (index, count) in enumerate(zip(batch_indices.tolist(), num_top.tolist(), strict=True))
        if token_ids[i] >= 0
    }
