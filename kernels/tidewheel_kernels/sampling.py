"""Drawing the next token of every sequence, without sorting the vocabulary on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tidewheel_kernels.backend import Op
from tidewheel_kernels.sampling_cpu import sample_cpu
from tidewheel_kernels.sampling_reference import sample_reference


@dataclass(frozen=True, eq=False)
class SamplingTensors:
    """Sampling parameters of a batch, one element per row, on the device of the logits.

    The flags say on the host whether any row needs a stage at all: True wherever a row that is sampled does. A row of
    a stage that is on can still be neutral, so all True is right for any batch that is not all greedy.
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
    """Draws one token per row of `logits` [B, V] (any float dtype, last dimension contiguous).

    `uniform` [B] float32 in [0, 1) drives the draw: the token is the first, in order of token ids, whose cumulative
    probability over the kept and renormalised tokens exceeds it. So a draw depends on its own row and number only.

    Order of the stages: temperature; top_k; top_p over the distribution that top_k left (the smallest set that
    reaches top_p, at least one token); min_p relative to the largest probability. Tokens whose logit ties with the
    last one kept by top_k or top_p are kept as well, so a stage can keep more tokens than it names. Greedy rows take
    the largest logit, the lowest id among equals.

    A row with a NaN or +inf, or with nothing but -inf, gives token -1; the other rows are not affected.
    """
    if logits.dim() != 2 or uniform.shape != logits.shape[:1]:
        raise ValueError(f"want logits [B, V] and uniform [B], got {tuple(logits.shape)} and {tuple(uniform.shape)}")
    if logits.shape[0] == 0:
        return SampleOutput(torch.empty(0, dtype=torch.int64, device=logits.device))
    return SampleOutput(_OP.on(logits)(logits, params, uniform))


_OP = Op("sample", reference=sample_reference, kernel="jit.sampling:sample", cpu=sample_cpu)
