"""Fill the slots of a model's layers with adapters, and group the tokens of a step by slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tidewheel.batch import Int32Array, ScheduledBatch, no_ids
from tidewheel.lora import NO_SLOT, LoraLoad
from tidewheel.models.causal_lm import CausalLM
from tidewheel.models.decoder import Decoder
from tidewheel_kernels.lora import TILE, group_tokens, max_tiles

HostGroups = tuple[Int32Array, Int32Array]  # tokens and slots of `LoraGroups`, on the host


class LoraStacks:
    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._stacks = [(linear.name, linear.lora) for linear in model.lora_linears if linear.lora is not None]
        *_, self._max_loras, self.max_rank = self._stacks[0][1].sizes
        self._slots, self._groups = no_ids(), (no_ids(), no_ids())  # of the tokens of the last step with adapters

    @classmethod
    def of(cls, model: CausalLM) -> LoraStacks | None:
        """Return the stacks of a model, None if it has none."""
        return cls(model) if isinstance(model, Decoder) and model.lora_linears[0].lora is not None else None

    def load(self, loads: Sequence[LoraLoad]) -> None:
        """Fill slots. A device copies in the order of its steps, so this waits for none of them."""
        for slot, lora in loads:
            for name, stack in self._stacks:
                stack.set(slot, lora.weights.by_layer[name])

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of a step's groups."""
        return max_tiles(num_tokens, self._max_loras) * (TILE + 1) * np.dtype(np.int32).itemsize

    def groups(self, batch: ScheduledBatch, num_tokens: int) -> HostGroups | None:
        """Return the groups of a step that is padded to `num_tokens`, None if no row has an adapter."""
        if not len(batch.lora_slots):
            return None
        return self.padded_groups(np.repeat(batch.lora_slots, batch.num_scheduled_tokens), num_tokens)

    def padded_groups(self, slots: Int32Array, num_tokens: int) -> HostGroups:
        """Return the groups of tokens with these slots, and of padding without an adapter up to `num_tokens`."""
        slots = np.concatenate((slots, np.full(num_tokens - len(slots), NO_SLOT, np.int32)))
        if not np.array_equal(slots, self._slots):  # decode steps often repeat the last one's
            self._groups = group_tokens(slots, max_tiles(num_tokens, self._max_loras))
            self._slots = slots
        return self._groups
