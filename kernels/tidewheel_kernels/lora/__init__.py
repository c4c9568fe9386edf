"""Low-rank adapters (LoRA) of many requests in one step: a token's adapter adds ``b @ (a @ x)`` to a layer's output.

Tokens are grouped into tiles of one adapter (Chen et al., "Punica: Multi-Tenant LoRA Serving", MLSys 2024): a first
kernel computes ``a @ x`` of each tile, a second adds ``b`` times it. Base tokens are in no tile.
"""

from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op, choose, preference_for
from tidewheel_kernels.lora.cpu import add_lora_native
from tidewheel_kernels.lora.groups import TILE, LoraGroups, group_tokens, max_tiles
from tidewheel_kernels.lora.reference import add_lora_reference
from tidewheel_kernels.lora.stacks import HostLoraStack, LoraMatrices, LoraSizes, LoraStack, StaticLoraStack

NAME = "add_lora"


def lora_stack(sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> LoraStack:
    """Return an empty stack for the implementation of `add_lora` on a device; "meta" stands for a GPU."""
    is_static = device.type == "meta" or choose(device.type, preference_for(NAME), has_cpu=True) == "triton"
    return (StaticLoraStack if is_static else HostLoraStack)(sizes, dtype, device)


def add_lora(
    out: torch.Tensor,  # [num_tokens, out_features], last dimension contiguous; updated in place
    x: torch.Tensor,  # [num_tokens, in_features] in out's dtype, last dimension contiguous
    stack: LoraStack,  # of out's dtype
    groups: LoraGroups,  # each token at most once
) -> None:
    """Add each grouped token's adapter to its row of `out`; other rows keep their bits.

    Sums are float32, and the result is rounded once. The C kernel rounds ``a @ x`` to out's dtype, too, as PEFT does.
    In the C and triton-lang kernels no bit of a row depends on other rows.
    """
    sizes = stack.sizes
    if out.shape != (len(x), sizes.out_features) or x.shape[1] != sizes.in_features or out.dtype != x.dtype:
        raise ValueError(
            f"out {list(out.shape)} in {out.dtype} and x {list(x.shape)} in {x.dtype} do not fit adapters of "
            f"{sizes.in_features} inputs and {sizes.out_features} outputs"
        )
    _OP.chosen[x.device, x.dtype](out, x, stack, groups)


_OP = Op(NAME, __name__, reference=add_lora_reference, cpu=add_lora_reference, native=add_lora_native)

__all__ = [
    "TILE",
    "LoraGroups",
    "LoraMatrices",
    "LoraSizes",
    "LoraStack",
    "add_lora",
    "group_tokens",
    "lora_stack",
    "max_tiles",
]
