from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.logprobs.reference import LogprobsOutput, compute_logprobs_reference


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobsOutput:
    """Return the float32 log-softmax of `logits` [B, V] at `token_ids` [B] (int32 or int64), their ranks, and
    the `num_top` likeliest tokens.

    A row with a NaN or +inf, or with only -inf, has no meaningful results. Raise `ValueError` for a bad `num_top`.
    """
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top must be in [0, {logits.shape[1]}], got {num_top}")
    return _OP.chosen[logits.device, logits.dtype](logits, token_ids, num_top)


_OP = Op("compute_logprobs", __name__, reference=compute_logprobs_reference)
