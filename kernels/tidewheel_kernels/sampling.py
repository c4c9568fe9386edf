"""Sampling of the next tokens, without sorting the vocabulary on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidewheel_kernels.backend import Op
from tidewheel_kernels.sampling_cpu import sample_cpu
from tidewheel_kernels.sampling_reference import sample_reference


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """Sampling parameters by row, on the device of the logits.

    A flag must be True if any sampled row needs its stage. Neutral rows are unaffected, so all True suits any batch
    that is not all greedy.
    """

    temperature: torch.Tensor  # [B] float32; below 1e-5 = greedy
    top_k: torch.Tensor  # [B] int32; <= 0 or >= vocabulary = off
    top_p: torch.Tensor  # [B] float32; >= 1 = off
    min_p: torch.Tensor  # [B] float32; <= 0 = off
    any_sampled: bool  # False: every row is greedy
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


class SampleOutput(NamedTuple):
    token_ids: torch.Tensor  # [B] int64; -1 for a row that cannot be sampled


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> SampleOutput:
    """Draw one token per row of `logits` [B, V] (any float dtype, last dimension contiguous).

    The result is the first token, by id, whose cumulative probability over the kept and renormalised tokens exceeds
    `uniform` [B] float32 in [0, 1). A draw depends only on its own row and number.

    The stages are temperature; top_k; top_p over what top_k left (the smallest set that reaches top_p, at least one
    token); min_p relative to the largest probability. top_k and top_p also keep ties with the last token kept. Greedy
    rows take the largest logit, the lowest id among equals.

    A row with a NaN or +inf, or with only -inf, gives -1; other rows are unaffected.
    """
    if logits.dim() != 2 or uniform.shape != logits.shape[:1]:
        raise ValueError(f"want logits [B, V] and uniform [B], got {tuple(logits.shape)} and {tuple(uniform.shape)}")
    if logits.shape[0] == 0:
        return SampleOutput(torch.empty(0, dtype=torch.int64, device=logits.device))
    return SampleOutput(_OP.on(logits)(logits, params, uniform))


_OP = Op("sample", reference=sample_reference, kernel="jit.sampling:sample", cpu=sample_cpu)
