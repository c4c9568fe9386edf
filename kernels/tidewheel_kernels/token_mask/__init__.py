from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.token_mask.cpu import apply_token_mask_cpu
from tidewheel_kernels.token_mask.reference import apply_token_mask_reference


def apply_token_mask(
    logits: torch.Tensor,  # [B, V]
    rows: torch.Tensor,  # [N] int32, in [0, B), each at most once
    bits: torch.Tensor,  # [N, at least ceil(V / 32)] int32; bit t % 32 of word t // 32 allows t
) -> None:
    """Set finite logits in `rows` to -inf, in place, for tokens that `bits` forbids."""
    if 32 * bits.shape[1] < logits.shape[1]:
        raise ValueError(f"{bits.shape[1]} words of 32 bits are too few for {logits.shape[1]} tokens")
    if rows.shape[0]:
        _OP.chosen[logits.device, logits.dtype](logits, rows, bits)


_OP = Op("apply_token_mask", __name__, reference=apply_token_mask_reference, cpu=apply_token_mask_cpu)
