from __future__ import annotations

from typing import NamedTuple

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.sampling.cpu import sample_cpu
from tidewheel_kernels.sampling.reference import SamplingTensors, sample_reference


class SampleOutput(NamedTuple):
    token_ids: torch.Tensor  # [B] int64


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> SampleOutput:
    """Draw one token per row of `logits` [B, V] (any float dtype, last dimension contiguous).

    The result is the first token, by id, whose cumulative probability over the kept tokens exceeds `uniform` [B]
    float32 in [0, 1). It depends on its row alone.

    Stages: temperature; top_k; top_p over what top_k left (the smallest set that reaches top_p); min_p relative to
    the largest probability. top_k and top_p keep ties with the last token kept. Greedy rows take the largest logit,
    the lowest id among equals. A row with a NaN or +inf, or with only -inf, gives -1.
    """
    if logits.dim() != 2 or uniform.shape != logits.shape[:1]:
        raise ValueError(f"want logits [B, V] and uniform [B], got {tuple(logits.shape)} and {tuple(uniform.shape)}")
    if logits.shape[0] == 0:
        return SampleOutput(torch.empty(0, dtype=torch.int64, device=logits.device))
    return SampleOutput(_OP.chosen[logits.device, logits.dtype](logits, params, uniform))


_OP = Op("sample", __name__, reference=sample_reference, cpu=sample_cpu)
