"""The tokens of a launched step, on their way back to the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.runner.sampler import Sampled, top_logprobs
from tidewheel.runner.sampling_plan import SamplingPlan
from tidewheel_kernels import LogprobsOutput


class PendingTokens:
    """Answers `wait` with the tokens of one batch. On CUDA nothing before `wait` waits for the device."""

    def __init__(self, batch: ScheduledBatch, plan: SamplingPlan | None, sampled: Sampled | None) -> None:
        self._batch = batch
        self._plan = plan
        self._result: SampledTokens | None = None
        self._copies: list[torch.Tensor] = []
        self._copied: torch.cuda.Event | None = None
        if sampled is not None:
            self._copies = list(_host_copies(sampled))
            if sampled.token_ids.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def wait(self) -> SampledTokens:
        """The tokens; every call answers the same."""
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
        for i, rules in plan.observers:
            if drawn[i] >= 0:
                rules.observe(int(drawn[i]))
        if not len(plan.logprob_rows):
            return SampledTokens(batch.step_id, token_ids)
        rows = plan.logprob_rows
        output = LogprobsOutput(*self._copies[1:])
        logprobs = top_logprobs(output, plan.num_top_logprobs, sampling[rows], drawn[rows])
        return SampledTokens(batch.step_id, token_ids, logprobs)


def _host_copies(sampled: Sampled) -> Iterator[torch.Tensor]:
    for tensor in (sampled.token_ids, *(sampled.logprobs or ())):
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            yield host.copy_(tensor, non_blocking=True)
        else:
            yield tensor
