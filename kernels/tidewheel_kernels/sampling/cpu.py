"""Sampling on a CPU, from the largest logits where they suffice."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from tidewheel_kernels.sampling.reference import (
    GREEDY_TEMPERATURE,
    GreedyTokens,
    SamplingTensors,
    draw,
    filtered_weights,
    min_p_filtered,
    top_k_threshold,
    top_p_threshold,
)

NUM_CANDIDATES = 257  # the last tells whether others equal the 256th
UNSETTLED = -2  # instead of a token that more logits decide
LEAST_EXPONENT = -80.0  # its exponential is normal


class Candidates(NamedTuple):
    """Largest logits of B rows; their tokens may be any of those that equal the last."""

    logits: torch.Tensor  # [B, n] float32, descending
    token_ids: torch.Tensor  # [B, n] int64
    totals: torch.Tensor  # [B, 1] float32 sums of exp((logit - max) / temperature) where top_p alone filters, else 0


def sample_cpu(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    if not params.any_sampled:
        return greedy_tokens_cpu(logits).token_ids
    values = logits.float()
    if not (params.any_top_k or params.any_top_p):  # min_p needs no order, and a search costs more than a draw
        return _drawn_from_rows(values, params, uniform)
    token_ids = draw_candidates(candidates_of(values, params), params, uniform, values.shape[-1])
    rest = (token_ids == UNSETTLED).nonzero().squeeze(-1)
    if len(rest):
        token_ids[rest] = _drawn_from_rows(_rows(values, rest), params.of_rows(rest), uniform[rest])
    return token_ids


def greedy_tokens_cpu(logits: torch.Tensor) -> GreedyTokens:
    """Return `greedy_tokens`, by numpy: its argmax is vectorised ([1, 49152], bfloat16: 56 -> 19 us)."""
    values = logits.float().numpy()
    token_ids = values.argmax(axis=-1, keepdims=True)  # of a NaN, if there is one
    max_logit = np.take_along_axis(values, token_ids, axis=-1)
    token_ids[~np.isfinite(max_logit)] = -1
    return GreedyTokens(torch.from_numpy(max_logit), torch.from_numpy(token_ids[:, 0]))


def temperature_weights_cpu(values: torch.Tensor, max_logit: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return `temperature_weights`, 0 where they vanish beside the maximum.

    Torch takes four times as long for an exponential of -inf.
    """
    exponents = (values - max_logit).div_(temperature.clamp(min=GREEDY_TEMPERATURE).unsqueeze(-1))
    weights = exponents.clamp_(min=LEAST_EXPONENT).exp_()
    return torch.threshold_(weights, 2.0 * math.exp(LEAST_EXPONENT), 0.0)


def candidates_of(logits: torch.Tensor, params: SamplingTensors) -> Candidates:
    """Return the `NUM_CANDIDATES` largest logits of each row, or all."""
    values = logits.float()
    ordered, token_ids = values.topk(min(NUM_CANDIDATES, values.shape[-1]), dim=-1)  # a NaN is the largest
    totals = torch.zeros(len(values), 1)
    if params.any_top_p:
        needed = (params.temperature >= GREEDY_TEMPERATURE) & (params.top_p < 1) & (params.top_k <= 0)
        rows = needed.nonzero().squeeze(-1)
        weights = temperature_weights_cpu(_rows(values, rows), ordered[rows, :1], params.temperature[rows])
        totals[rows] = weights.sum(dim=-1, keepdim=True)
    return Candidates(ordered, token_ids, totals)


def draw_candidates(
    candidates: Candidates, params: SamplingTensors, uniform: torch.Tensor, vocabulary: int, slack: float = 0.0
) -> torch.Tensor:
    """Return [B] tokens, `UNSETTLED` where a token that is no candidate might be drawn.

    `slack`: bound of the relative error of `totals`. A row whose token may depend on it is unsettled.
    """
    ordered, token_ids, totals = candidates
    is_greedy = params.temperature < GREEDY_TEMPERATURE
    weights = temperature_weights_cpu(ordered, ordered[:, :1], params.temperature)
    has_all = ordered.shape[-1] == vocabulary
    top_k = params.top_k.clamp(min=0).masked_fill(is_greedy, 1)
    is_cut = top_k.unsqueeze(-1) > 0
    threshold = top_k_threshold(ordered, top_k).masked_fill(~is_cut, float("-inf"))
    settled = torch.ones_like(is_cut)
    if params.any_top_p:
        # Ties with the k-th count towards the total.
        kept = weights.where(ordered >= threshold, 0.0)
        is_known = ~is_cut | (threshold > ordered[:, -1:]) | has_all
        total = totals.where(~is_cut, kept.sum(dim=-1, keepdim=True))
        low = top_p_threshold(ordered, kept, params.top_p, total * (1 + slack))
        high = top_p_threshold(ordered, kept, params.top_p, total * (1 - slack)) if slack else low
        settled = (params.top_p >= 1).unsqueeze(-1) | is_known & (low == high) & total.isfinite()
        threshold = threshold.maximum(low)
    kept = min_p_filtered(weights.where(ordered >= threshold, 0.0), params)
    settled = settled & (has_all | (kept[:, -1:] == 0))
    by_id, order = token_ids.sort(dim=-1)
    drawn = draw(kept.gather(-1, order), uniform.masked_fill(is_greedy, 0.0)).unsqueeze(-1)
    found = by_id.gather(-1, drawn).masked_fill(~settled, UNSETTLED)
    return found.masked_fill(~ordered[:, :1].isfinite(), -1).squeeze(-1)


def _drawn_from_rows(values: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    greedy = greedy_tokens_cpu(values)
    sampled = (params.temperature >= GREEDY_TEMPERATURE) & (greedy.token_ids >= 0)
    weights = min_p_filtered(temperature_weights_cpu(values, greedy.max_logit, params.temperature), params)
    if params.any_top_k or params.any_top_p:
        rows = (sampled & ((params.top_k > 0) | (params.top_p < 1))).nonzero().squeeze(-1)
        weights[rows] = filtered_weights(_rows(values, rows), params.of_rows(rows))
    return torch.where(sampled, draw(weights, uniform), greedy.token_ids)


def _rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return values if len(rows) == len(values) else values[rows]
