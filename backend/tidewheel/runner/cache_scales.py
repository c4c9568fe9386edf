"""Scales of a KV cache of 8-bit floats, for each layer and KV head: measured once, at load.

So they follow from the model alone, and no request changes what a later one gets. vLLM can take them from its first
request, or has 1.0: Llama-3.1-70B has a perplexity of 2.732 without 8 bits, then 2.748 and 2.887
(https://github.com/ROCm/vllm/pull/317). A scale is a power of two: a float has the same relative precision at any
scale, and the division is exact.
"""

from __future__ import annotations

import logging

import torch

from tidewheel.models.causal_lm import CausalLM
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel_kernels import FP8

logger = logging.getLogger(__name__)

NUM_TOKENS = 256
HEADROOM = 4.0  # least factor between the largest value that is kept and that seen; what is beyond saturates
# Normal numbers of float16.
LEAST_EXPONENT, MOST_EXPONENT = -14, 15


def with_scales(
    layout: CacheLayout, model: CausalLM, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> CacheLayout:
    """Return the layout with scales, from a prompt of random tokens in the `dtype` of the model."""
    count = min(NUM_TOKENS, max_model_len)
    meta = one_sequence(count, layout.block_size, device)
    kv = KVTensors(layout._replace(dtype=dtype), meta.block_tables.shape[1], device)
    with torch.inference_mode():
        tokens = random_tokens(count, layout.shape.vocab_size, device)
        positions = torch.arange(count, device=device)
        model.forward(tokens, positions, meta, kv.layers, positions[-1:])
        scales = scales_of_largest(kv.largest().cpu())
    logger.info(
        "scales of the KV cache, from %d tokens: keys %g to %g, values %g to %g",
        count, *(float(end) for of_kind in scales.unbind(1) for end in of_kind.aminmax()),
    )  # fmt: skip
    return layout._replace(scales=scales.to(device))


def scales_of_largest(largest: torch.Tensor) -> torch.Tensor:
    """Return powers of two; 1 for a head that gave nothing, or no numbers."""
    exponents = torch.frexp(largest.float() * (HEADROOM / torch.finfo(FP8).max)).exponent
    powers = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float32), exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    )
    return torch.where(largest.isfinite() & (largest > 0), powers, 1.0)
