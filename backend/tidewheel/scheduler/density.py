"""Compute per byte of KV cache: what the `density` policy orders by."""

from __future__ import annotations


def density(num_prompt_tokens: int, num_output_tokens: float, num_cached_tokens: int = 0) -> float:
    """Tokens computed per token of KV held for one step; the denser request is served first.

        compute    prompt - cached + output
        memory     prompt · output + output² / 2        tokens held, summed over the steps of decoding

    After the idea of BlendServe (Zhao et al., 2024, arXiv:2411.16102) to tell requests apart by compute over memory;
    the formula counts our own steps. One model's FLOPs per token and bytes per token of KV are the same for all
    requests, so the order needs neither of them.

    `num_output_tokens` is the predicted length; below 1 it counts as 1, so that the result is finite.
    """
    output = max(num_output_tokens, 1.0)
    compute = num_prompt_tokens - num_cached_tokens + output
    return compute / (num_prompt_tokens * output + output * output / 2.0)
