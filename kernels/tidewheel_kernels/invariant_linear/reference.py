from __future__ import annotations

import torch


def invariant_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)
