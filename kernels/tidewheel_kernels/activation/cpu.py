from __future__ import annotations

import torch
from torch.nn.functional import silu


def silu_and_mul_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
