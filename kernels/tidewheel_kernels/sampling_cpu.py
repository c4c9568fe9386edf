"""Sampling on the CPU: finds the thresholds from the largest few hundred logits instead of sorting the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tidewheel_kernels.sampling_reference import (
    GREEDY_TEMPERATURE,
    draw,
    filtered_weights,
    greedy_tokens,
    min_p_filtered,
    temperature_weights,
    top_k_threshold,
    top_p_threshold,
)

if TYPE_CHECKING:
    from tidewheel_kernels.sampling import SamplingTensors

NUM_CANDIDATES = 256


def sample_cpu(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64; see `tidewheel_kernels.sampling.sample`."""
    greedy = greedy_tokens(logits)
    if not params.any_sampled:
        return greedy.token_ids
    sampled = (params.temperature >= GREEDY_TEMPERATURE) & (greedy.token_ids >= 0)
    drawn = draw(_weights(logits.float(), greedy.max_logit, params), uniform)
    return torch.where(sampled, drawn, greedy.token_ids)


def _weights(values: torch.Tensor, max_logit: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """What `filtered_weights` returns."""
    weights = temperature_weights(values, max_logit, params.temperature)
    if params.any_top_k or params.any_top_p:
        threshold = _threshold(values, weights, params)
        if threshold is None:
            return filtered_weights(values, params)
        weights = weights.where(values >= threshold, 0.0)
    return min_p_filtered(weights, params)


def _threshold(values: torch.Tensor, weights: torch.Tensor, params: SamplingTensors) -> torch.Tensor | None:
    """[B, 1] lowest logit that top_k and top_p keep, or None where the candidates do not settle it for every row."""
    size = values.shape[-1]
    num_candidates = min(NUM_CANDIDATES, size)
    ordered, order = values.topk(num_candidates, dim=-1)
    top_k = params.top_k
    k_is_on = ((top_k > 0) & (top_k < size)) if params.any_top_k else torch.zeros_like(top_k, dtype=torch.bool)
    if bool((top_k[k_is_on] > num_candidates).any()):
        return None
    lowest = torch.where(k_is_on.unsqueeze(-1), top_k_threshold(ordered, top_k * k_is_on), float("-inf"))
    if not params.any_top_p:
        return lowest
    # Every token that ties with the k-th counts towards the total, also where it is not among the candidates.
    total = weights.where(values >= lowest, 0.0).sum(dim=-1, keepdim=True)
    candidate_weights = weights.gather(-1, order).where(ordered >= lowest, 0.0)
    needed = params.top_p.unsqueeze(-1) * total
    if bool(((candidate_weights.sum(dim=-1, keepdim=True) < needed) & (params.top_p.unsqueeze(-1) < 1)).any()):
        return None
    return top_p_threshold(ordered, candidate_weights, params.top_p, total).maximum(lowest)
