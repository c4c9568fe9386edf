from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobsOutput(NamedTuple):
    logprobs: torch.Tensor  # [B] float32; NaN if out of range
    ranks: torch.Tensor  # [B] int32; 1 = most likely, ties share the last rank, 0 out of range
    top_token_ids: torch.Tensor  # [B, num_top] int64, most likely first
    top_logprobs: torch.Tensor  # [B, num_top] float32


def compute_logprobs_reference(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobsOutput:
    values = logits.float()
    normalizer = values.logsumexp(dim=-1, keepdim=True)
    valid = (token_ids >= 0) & (token_ids < logits.shape[1])
    chosen = values.gather(-1, token_ids.where(valid, 0).long().unsqueeze(-1))
    ranks = (values >= chosen).sum(dim=-1, dtype=torch.int32)  # as vLLM
    logprobs = (chosen - normalizer).squeeze(-1).masked_fill(~valid, float("nan"))
    top = values.topk(num_top, dim=-1)
    return LogprobsOutput(logprobs, ranks.masked_fill(~valid, 0), top.indices, top.values - normalizer)
