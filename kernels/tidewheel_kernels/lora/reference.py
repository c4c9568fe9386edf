from __future__ import annotations

import torch

from tidewheel_kernels.lora.groups import TILE, LoraGroups
from tidewheel_kernels.lora.stacks import LoraStack


def add_lora_reference(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, groups: LoraGroups) -> None:
    tiles = groups.tokens.view(-1, TILE).long()
    slots = groups.slots.tolist()
    for slot in sorted({slot for slot in slots if slot >= 0}):
        tokens = tiles[[index for index, other in enumerate(slots) if other == slot]].flatten()
        tokens = tokens[tokens >= 0]
        inputs, first = x[tokens].float(), 0
        for matrices, num_outputs in zip(stack.matrices(slot), stack.sizes.part_sizes, strict=True):
            columns = out[:, first : first + num_outputs]
            first += num_outputs
            if matrices is not None:
                delta = inputs @ matrices.a.float().T @ matrices.b.float().T
                columns[tokens] = (columns[tokens].float() + delta).to(out.dtype)
