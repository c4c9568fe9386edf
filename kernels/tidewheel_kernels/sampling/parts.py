"""Sampling where the vocabulary is split: a part's contribution, and what follows from those of all parts.

A part begins at token `first_id`. The tokens are those that whole logits give.
"""

from __future__ import annotations

import torch

from tidewheel_kernels.sampling.cpu import (
    NUM_CANDIDATES,
    Candidates,
    candidates_of,
    draw_candidates,
    greedy_tokens_cpu,
    temperature_weights_cpu,
)
from tidewheel_kernels.sampling.reference import SamplingTensors, greedy_tokens

SUM_ERROR = 2e-5  # bound of the relative error of a sum of weights: exponentials of up to 20 in float32


def largest_of_part(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """Return [2, B] float64: the largest logit of each row, and its token. No device value is read."""
    largest, token_ids = (greedy_tokens_cpu if logits.device.type == "cpu" else greedy_tokens)(logits)
    return torch.stack((largest.squeeze(1).double(), (token_ids + first_id).double()))  # exact in both


def largest_tokens(parts: torch.Tensor) -> torch.Tensor:
    """Return tokens [B] int64 from `parts` [N, 2, B], -1 for a row with a NaN or +inf, or with only -inf."""
    logits, token_ids = parts.unbind(1)
    largest, chosen = logits.max(dim=0)  # the first of equals; a NaN, if there is one
    return token_ids.gather(0, chosen.unsqueeze(0)).squeeze(0).long().masked_fill(~largest.isfinite(), -1)


def candidates_of_part(logits: torch.Tensor, first_id: int, params: SamplingTensors) -> torch.Tensor:
    """Return [B, 2 n + 1] float32: logits and total of `candidates_of`, and the bits of its token ids."""
    ordered, token_ids, totals = candidates_of(logits, params)
    return torch.cat((ordered, totals, (token_ids + first_id).int().view(torch.float32)), dim=1)


def draw_from_parts(
    parts: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Return tokens [B] int64 from `parts` [N, B, 2 n + 1], `UNSETTLED` where they do not tell."""
    count = parts.shape[-1] // 2
    logits, totals, bits = parts.tensor_split([count, count + 1], dim=-1)
    ordered, order = logits.transpose(0, 1).flatten(1).topk(min(NUM_CANDIDATES, len(parts) * count), dim=-1)
    token_ids = bits.transpose(0, 1).flatten(1).view(torch.int32).gather(-1, order).long()
    scales = temperature_weights_cpu(logits[..., :1], ordered[:, :1], params.temperature)
    merged = Candidates(ordered, token_ids, (totals * scales).sum(0))
    return draw_candidates(merged, params, uniform, vocabulary, SUM_ERROR)
