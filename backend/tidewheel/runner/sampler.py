import itertools
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tidewheel.batch import NOT_DRAFTED, TO_DRAFT, Int32Array, Launch, SampledTokens, ScheduledBatch
from tidewheel.models.shard import Shard
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel.runner.drafter import DraftedTokens
from tidewheel.runner.inputs import DeviceArrays
from tidewheel.runner.sampling_plan import SCORED_AT_ONCE, PoolingPlan, PromptScoring, SamplingPlan
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
from tidewheel_kernels.sampling.cpu import UNSETTLED
from tidewheel_kernels.sampling.parts import candidates_of_part, draw_from_parts, largest_of_part, largest_tokens


class SamplerOutput(NamedTuple):
    """Sampled tokens and log-probabilities of S rows, on the device."""

    token_ids: torch.Tensor | None = None  # [S] int64, -1: non-finite logits; None: no row samples
    logprobs: LogprobsOutput | None = None  # of the plan's `logprob_rows`
    prompt_logprobs: LogprobsOutput | None = None  # of the scored positions
    pooled: torch.Tensor | None = None  # [R, hidden_size] float32


def draw_tokens(logits: torch.Tensor, draw: Sequence[torch.Tensor], flags: Sequence[bool]) -> torch.Tensor:
    """Return ids [S] int64 without reading device values. `flags`: of `SamplingTensors`."""
    temperature, top_k, top_p, min_p, uniform = draw
    return sample(logits, SamplingTensors(temperature, top_k, top_p, min_p, *flags), uniform).token_ids


def sample_part(
    part: torch.Tensor, shard: Shard, plan: SamplingPlan, sent: DeviceArrays, history: Callable[[], TokenHistory]
) -> SamplerOutput:
    """Do as `sample_tokens`, from a rank's part of the logits. Only rank 0 has log-probabilities."""
    if shard.num_ranks == 1:
        return sample_tokens(part, plan, sent, history)
    if plan.logit_use == "largest":
        return SamplerOutput(largest_of_ranks(part, shard))
    if plan.logit_use == "draw" and any(plan.flags[1:]) and not part.is_cuda:  # a GPU would wait for `UNSETTLED`
        return SamplerOutput(_drawn_of_ranks(part, shard, plan, sent))
    logits = shard.gather(part)
    sampled = SamplerOutput() if shard.rank else sample_tokens(logits, plan, sent, history)
    return sampled._replace(token_ids=shard.from_leader(sampled.token_ids, part))


def largest_of_ranks(part: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return ids [S] int64 without reading device values."""
    return largest_tokens(shard.collectives.all_gather(largest_of_part(part, shard.rank * part.shape[1])))


def _drawn_of_ranks(part: torch.Tensor, shard: Shard, plan: SamplingPlan, sent: DeviceArrays) -> torch.Tensor:
    """Return ids [S] int64. Whole logits are gathered of rows that candidates do not settle."""
    temperature, top_k, top_p, min_p, uniform = sent["draw"]
    params, size = SamplingTensors(temperature, top_k, top_p, min_p, *plan.flags), part.shape[1]
    parts = shard.collectives.all_gather(candidates_of_part(part, shard.rank * size, params))
    drawn = None if shard.rank else draw_from_parts(parts, params, uniform, size * shard.num_ranks)
    token_ids = shard.from_leader(drawn, part)
    rest = (token_ids == UNSETTLED).nonzero().squeeze(1)
    if len(rest):
        logits = shard.gather(part[rest])
        drawn = None if shard.rank else sample(logits, params.of_rows(rest), uniform[rest]).token_ids
        token_ids[rest] = shard.from_leader(drawn, rest)
    return token_ids


def sample_tokens(
    logits: torch.Tensor, plan: SamplingPlan, sent: DeviceArrays, history: Callable[[], TokenHistory]
) -> SamplerOutput:
    """Return a token per row of `logits` [S, V], which may be overwritten.

    Order of vLLM: log-probabilities, allowed tokens, biases, forbidden words, penalties, grammar masks, temperature,
    top_k, top_p, min_p, draw.
    """
    if logits.dtype != torch.float32 and plan.changes_logits:
        logits = logits.float()
    logprob_rows = sent["logprob_rows"]
    raw = logits.index_select(0, logprob_rows[0]) if logprob_rows else logits
    if plan.allowed is not None:
        rows, words = sent["allowed"]
        apply_token_mask(logits, rows, words.view(len(rows), -1))
    if plan.bias is not None:
        apply_logit_bias(logits, *sent["bias"])
    if plan.words is not None:
        forbid_words(logits, history(), WordTensors(*sent["words"]))
    if plan.penalties is not None:
        apply_penalties(logits, history(), PenaltyTensors(plan.max_num_tokens, *sent["penalties"]))
    if plan.masks is not None:
        bits = plan.masks.bits.result().to(logits.device, non_blocking=True)
        apply_token_mask(logits, sent["mask_rows"][0], bits)
    token_ids = draw_tokens(logits, sent["draw"], plan.flags)
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
    """Return sums [R, hidden_size] float32 of `states` [P, hidden_size] by row; `owners` [P]: each state's row."""
    sums = torch.zeros(len(pooling.batch_indices), states.shape[1], dtype=torch.float32, device=states.device)
    return sums.index_add_(0, owners, states.float())


@dataclass(eq=False)
class PendingStep:
    """Launched step. Copies to the host are queued at launch: the next step may overwrite its tensors."""

    is_done = None

    batch: ScheduledBatch
    plan: SamplingPlan
    sampled: SamplerOutput
    accelerator: InitVar[CudaAccelerator | None]
    launch: Launch
    drafts: DraftedTokens | None = None

    def __post_init__(self, accelerator: CudaAccelerator | None) -> None:
        self._result: SampledTokens | None = None
        self._copied: torch.cuda.Event | None = None
        if accelerator is not None and any(output is not None for output in self.sampled):
            self.sampled = _host_copies(self.sampled, accelerator)
            if self.drafts is not None:
                self.drafts = self.drafts._replace(token_ids=_host_copies(self.drafts.token_ids, accelerator))
            self._copied = accelerator.event()
            self._copied.record()

    def wait(self) -> SampledTokens:
        if self._result is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._result = self._collected()
        return self._result

    def _collected(self) -> SampledTokens:
        batch, plan, sampled = self.batch, self.plan, self.sampled
        token_ids = np.full(len(batch.rows), SampledTokens.NOT_SAMPLED, dtype=np.int32)
        logprobs = prompt_logprobs = pooled = None
        if sampled.token_ids is not None:
            sampling = np.flatnonzero(batch.samples)
            drawn = sampled.token_ids.numpy()
            token_ids[sampling] = np.where(drawn < 0, SampledTokens.NOT_FINITE, drawn)
            if sampled.logprobs is not None:
                entries = _top_logprobs(sampled.logprobs, plan.num_top_logprobs)
                indices = sampling[plan.logprob_rows].tolist()
                logprobs = {i: entry for i, entry in zip(indices, entries, strict=True) if token_ids[i] >= 0}
        if sampled.prompt_logprobs is not None and (scoring := plan.scoring) is not None:
            scored = iter(_top_logprobs(sampled.prompt_logprobs, np.repeat(scoring.num_top, scoring.counts)))
            counts = zip(scoring.batch_indices.tolist(), scoring.counts.tolist(), strict=True)
            prompt_logprobs = {index: list(itertools.islice(scored, count)) for index, count in counts}
        if sampled.pooled is not None and plan.pooling is not None:
            pooled = dict(zip(plan.pooling.batch_indices.tolist(), sampled.pooled.numpy(), strict=True))
        draft_tokens, has_caught_up = None, False
        if self.drafts is not None:
            has_caught_up = self.drafts.has_caught_up
            draft_tokens = np.where(batch.draft_tokens == TO_DRAFT, NOT_DRAFTED, batch.draft_tokens)
            draft_tokens[self.drafts.entries] = self.drafts.token_ids.numpy()
        return SampledTokens(
            batch.step_id, token_ids, logprobs, prompt_logprobs, pooled, self.launch, draft_tokens, has_caught_up
        )


def _host_copies(outputs: Any, accelerator: CudaAccelerator) -> Any:
    if isinstance(outputs, tuple):
        return type(outputs)(*(_host_copies(output, accelerator) for output in outputs))
    if outputs is None:
        return None
    return accelerator.pinned(outputs.shape, outputs.dtype).copy_(outputs, non_blocking=True)


def _top_logprobs(output: LogprobsOutput, num_top: Int32Array) -> list[TopLogprobs]:
    logprobs, ranks = output.logprobs.tolist(), output.ranks.tolist()
    ids, values = output.top_token_ids.tolist(), output.top_logprobs.tolist()
    return [
        TopLogprobs(logprobs[i], ranks[i], tuple(ids[i][:count]), tuple(values[i][:count]))
        for i, count in enumerate(num_top.tolist())
    ]
