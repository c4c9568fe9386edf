"""Sampled tokens on their way to the host."""

from __future__ import annotations

import numpy as np
import torch

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.runner.accelerator import Accelerator, Event
from tidewheel.runner.sampler import Sampled, top_logprobs
from tidewheel.runner.sampling_plan import SamplingPlan
from tidewheel_kernels import LogprobsOutput


class PendingTokens:
    """Tokens of one batch. On CUDA only `wait` blocks.

    Copies are queued at once, so the next step may overwrite these tokens.
    """

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
        """Return the tokens, on every call the same."""
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
        logprobs = top_logprobs(output, plan.num_top_logprobs, sampling[rows], drawn[rows])
        return SampledTokens(batch.step_id, token_ids, logprobs)


def _host_copy(tensor: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    return accelerator.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
