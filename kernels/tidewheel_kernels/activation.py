"""Gated activation of the feed-forward block."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tidewheel_kernels.backend import Op


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map ``gate_up = cat(gate, up)`` to ``silu(gate) * up``: [num_tokens, 2 * I] -> [num_tokens, I], same dtype."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up needs an even last dimension, got shape {tuple(gate_up.shape)}")
    return _OP.on(gate_up)(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def silu_and_mul_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute two passes in the input's dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


_OP = Op(
    "silu_and_mul",
    reference=silu_and_mul_reference,
    kernel="jit.activation:silu_and_mul",
    cpu=silu_and_mul_cpu,
    native="native.ops:silu_and_mul",
)
