"""Log-probabilities of chosen tokens, their rank, and the most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tidewheel_kernels.backend import Op


class ChosenLogprobs(NamedTuple):
    logprobs: torch.Tensor  # [B] float32
    ranks: torch.Tensor  # [B] int32
    log_normalizer: torch.Tensor  # [B] float32, log sum exp of the row


class LogprobsOutput(NamedTuple):
    logprobs: torch.Tensor  # [B] float32; NaN where the token id is out of range
    ranks: torch.Tensor  # [B] int32; 1 = most likely, tokens that tie share the best rank, 0 where out of range
    top_token_ids: torch.Tensor  # [B, num_top] int64, most likely first
    top_logprobs: torch.Tensor  # [B, num_top] float32


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobsOutput:
    """Log-softmax in float32 of `logits` [B, V] at `token_ids` [B] (int32 or int64) and at the `num_top` largest."""
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top must be in [0, {logits.shape[1]}], got {num_top}")
    chosen = _OP.on(logits.device)(logits, token_ids)
    top_values, top_token_ids = logits.topk(num_top, dim=-1)
    top_logprobs = top_values.float() - chosen.log_normalizer.unsqueeze(-1)
    return LogprobsOutput(chosen.logprobs, chosen.ranks, top_token_ids, top_logprobs)


def chosen_logprobs_reference(logits: torch.Tensor, token_ids: torch.Tensor) -> ChosenLogprobs:
    values = logits.float()
    normalizer = values.logsumexp(dim=-1)
    valid = (token_ids >= 0) & (token_ids < logits.shape[1])
    chosen = values.gather(-1, token_ids.where(valid, 0).long().unsqueeze(-1))
    ranks = 1 + (values > chosen).sum(dim=-1, dtype=torch.int32)
    logprobs = (chosen.squeeze(-1) - normalizer).masked_fill(~valid, float("nan"))
    return ChosenLogprobs(logprobs, ranks.masked_fill(~valid, 0), normalizer)


_OP = Op("compute_logprobs", reference=chosen_logprobs_reference, kernel="jit.logprobs:chosen_logprobs")
