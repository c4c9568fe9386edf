from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

GREEDY_TEMPERATURE = 1e-5  # less loses differences between logits


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """Sampling parameters by row; a stage's flag is True if any sampled row needs it."""

    temperature: torch.Tensor  # [B] float32; below 1e-5 = greedy
    top_k: torch.Tensor  # [B] int32; <= 0 or >= vocabulary = off
    top_p: torch.Tensor  # [B] float32; >= 1 = off
    min_p: torch.Tensor  # [B] float32; <= 0 = off
    any_sampled: bool  # False: every row is greedy
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    def of_rows(self, rows: torch.Tensor) -> SamplingTensors:
        return replace(
            self,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


class GreedyTokens(NamedTuple):
    max_logit: torch.Tensor  # [B, 1] float32
    token_ids: torch.Tensor  # [B] int64, -1: unusable


def greedy_tokens(logits: torch.Tensor) -> GreedyTokens:
    # torch's max propagates NaN.
    max_logit, token_ids = logits.max(dim=-1)
    return GreedyTokens(max_logit.float().unsqueeze(-1), token_ids.masked_fill(~max_logit.isfinite(), -1))


def sample_reference(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    greedy = greedy_tokens(logits)
    if not params.any_sampled:
        return greedy.token_ids
    drawn = draw(filtered_weights(logits, params), uniform)
    sampled = (params.temperature >= GREEDY_TEMPERATURE) & (greedy.token_ids >= 0)
    return torch.where(sampled, drawn, greedy.token_ids)


def filtered_weights(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Return [B, V] float32: ``exp((logit - max) / temperature)`` of kept tokens, else 0."""
    values = logits.float()
    weights = temperature_weights(values, values.max(dim=-1, keepdim=True).values, params.temperature)
    if params.any_top_k or params.any_top_p:
        ordered, order = values.sort(dim=-1, descending=True)
        threshold = top_k_threshold(ordered, params.top_k) if params.any_top_k else ordered[:, -1:]
        if params.any_top_p:
            ordered_weights = weights.gather(-1, order).where(ordered >= threshold, 0.0)
            total = ordered_weights.sum(dim=-1, keepdim=True)
            threshold = top_p_threshold(ordered, ordered_weights, params.top_p, total).maximum(threshold)
        weights = weights.where(values >= threshold, 0.0)
    return min_p_filtered(weights, params)


def temperature_weights(values: torch.Tensor, max_logit: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return torch.exp((values - max_logit) / temperature.clamp(min=GREEDY_TEMPERATURE).unsqueeze(-1))


def top_k_threshold(ordered: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return [B, 1]: the k-th largest logit, or the smallest of `ordered` if top_k is off."""
    size = ordered.shape[-1]
    rank = torch.where((top_k <= 0) | (top_k > size), size, top_k).long().unsqueeze(-1) - 1
    return ordered.gather(-1, rank)


def top_p_threshold(
    ordered: torch.Tensor,  # [B, n] largest logits, descending
    ordered_weights: torch.Tensor,  # [B, n]
    top_p: torch.Tensor,  # [B]
    total: torch.Tensor,  # [B, 1] of the whole row
) -> torch.Tensor:
    """Return [B, 1]: the lowest logit of the fewest tokens that hold top_p of the weight; -inf if off."""
    before = ordered_weights.cumsum(dim=-1) - ordered_weights
    needed = (before < top_p.unsqueeze(-1) * total).sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, needed - 1).masked_fill(top_p.unsqueeze(-1) >= 1, float("-inf"))


def min_p_filtered(weights: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    return weights.where(weights >= params.min_p.unsqueeze(-1), 0.0) if params.any_min_p else weights


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return [B] indices of the first token whose cumulative weight exceeds ``uniform * total``."""
    cumulative = weights.cumsum(dim=-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
