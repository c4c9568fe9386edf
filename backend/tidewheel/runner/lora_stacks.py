"""Adapters in the slots of a model's layers, and the columns of a step's tokens that have one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidewheel.batch import Int32Array, ScheduledBatch, no_ids
from tidewheel.lora import NO_SLOT, LoraLoad
from tidewheel.models.causal_lm import CausalLM
from tidewheel.models.decoder import Decoder
from tidewheel_kernels.lora import TILE, group_tokens, max_tiles

LoraColumns = tuple[Int32Array, Int32Array]  # of `LoraGroups`


class LoraStacks:
    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._stacks = [(linear.name, linear.lora) for linear in model.lora_linears if linear.lora is not None]
        *_, self._max_loras, self.max_rank = self._stacks[0][1].sizes
        self._slots, self._columns = no_ids(), (no_ids(), no_ids())  # of tokens, in the last step with adapters

    @classmethod
    def of(cls, model: CausalLM) -> LoraStacks | None:
        """Return the stacks of a model, None if it has none."""
        return cls(model) if isinstance(model, Decoder) and model.lora_linears[0].lora is not None else None

    def load(self, loads: Sequence[LoraLoad]) -> None:
        """Fill slots. A device copies in the order of its steps, so this waits for none of them."""
        for slot, lora in loads:
            for name, stack in self._stacks:
                stack.set(slot, lora.weights.of[name])

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of a step's columns."""
        return max_tiles(num_tokens, self._max_loras) * (TILE + 1) * np.dtype(np.int32).itemsize

    def columns(self, batch: ScheduledBatch, num_tokens: int) -> LoraColumns | None:
        """Return the columns of a step that is padded to `num_tokens`, None if no row has an adapter."""
        if not len(batch.lora_slots):
            return None
        return self.padded(np.repeat(batch.lora_slots, batch.num_scheduled_tokens), num_tokens)

    def padded(self, slots: Int32Array, num_tokens: int) -> LoraColumns:
        """Return the columns of tokens with these slots, and of others without."""
        slots = np.concatenate((slots, np.full(num_tokens - len(slots), NO_SLOT, np.int32)))
        if not np.array_equal(slots, self._slots):  # decode steps often have those of the last
            self._columns = group_tokens(slots, max_tiles(num_tokens, self._max_loras))
            self._slots = slots
        return self._columns
