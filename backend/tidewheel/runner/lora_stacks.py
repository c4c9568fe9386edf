"""Adapters in the slots of a model's layers, and the columns of a step's tokens that have one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidewheel.batch import Int32Array, ScheduledBatch, no_ids
from tidewheel.lora import NO_SLOT, LoraLoad
from tidewheel.models.causal_lm import CausalLM
from tidewheel.models.decoder import Decoder
from tidewheel.models.linear import Linear
from tidewheel_kernels.lora import TILE, LoraGroups, LoraStack, group_tokens, max_tiles

LoraColumns = tuple[Int32Array, Int32Array]  # of `LoraGroups`


class LoraStacks:
    def __init__(self, stacks: Sequence[tuple[Linear, LoraStack]]) -> None:
        self._stacks = stacks
        *_, self._max_loras, self.max_rank = stacks[0][1].sizes
        self._grouped_slots: Int32Array = no_ids()
        self._columns: LoraColumns = no_ids(), no_ids()

    @classmethod
    def of(cls, model: CausalLM) -> LoraStacks | None:
        """Return the slots of a model, None if it has none."""
        linears = model.lora_linears if isinstance(model, Decoder) else ()
        stacks = [(linear, linear.lora) for linear in linears if linear.lora is not None]
        return cls(stacks) if stacks else None

    def load(self, loads: Sequence[LoraLoad]) -> None:
        """Fill slots. A device copies in the order of its steps, so this waits for none of them."""
        for slot, lora in loads:
            for linear, stack in self._stacks:
                stack.set(slot, lora.weights.of[linear.name])

    def staged_bytes(self, num_tokens: int) -> int:
        """Return the size of a step's columns."""
        return max_tiles(num_tokens, self._max_loras) * (TILE + 1) * np.dtype(np.int32).itemsize

    def padding(self, num_tokens: int) -> LoraColumns:
        return self._grouped(np.full(num_tokens, NO_SLOT, np.int32))

    def columns(self, batch: ScheduledBatch, num_tokens: int) -> LoraColumns | None:
        """Return the columns of a step that is padded to `num_tokens`, None if no row has an adapter."""
        if not len(batch.lora_slots):
            return None
        slots = np.full(num_tokens, NO_SLOT, np.int32)
        slots[: batch.num_tokens] = np.repeat(batch.lora_slots, batch.num_scheduled_tokens)
        return self._grouped(slots)

    def _grouped(self, slots_of_tokens: Int32Array) -> LoraColumns:
        if not np.array_equal(slots_of_tokens, self._grouped_slots):  # as from one decode step to the next
            self._columns = group_tokens(slots_of_tokens, max_tiles(len(slots_of_tokens), self._max_loras))
            self._grouped_slots = slots_of_tokens
        return self._columns


def lora_groups(columns: Sequence[torch.Tensor]) -> LoraGroups | None:
    return LoraGroups(*columns) if columns else None
