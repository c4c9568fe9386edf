"""A runner whose rows have adapters, without a scheduler that knows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.lora import NO_SLOT, Lora, LoraLoad
from tidewheel.models.lora_folder import read_lora
from tidewheel.runner.model_runner import ModelRunner

MAX_RANK = 8


class LoraRunner:
    """Runner that gives each row the slot of its request's adapter, whose folder's name the request's begins with."""

    def __init__(self, runner: ModelRunner, adapters: Sequence[Path]) -> None:
        self.info, self.kv, self._runner = runner.info, runner.kv, runner
        loras = [
            Lora(path.name, i, path, read_lora(path, runner._steps.model, MAX_RANK))
            for i, path in enumerate(adapters)
        ]
        self._loads = tuple(LoraLoad(slot, lora) for slot, lora in enumerate(loras))
        self._slots = {lora.name: slot for slot, lora in self._loads}
        self._slot_of_row: dict[int, int] = {}

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        for new in batch.new_rows:
            self._slot_of_row[new.row] = self._slots.get(new.request.request_id.split()[0], NO_SLOT)
        slots = np.array([self._slot_of_row[row] for row in batch.rows.tolist()], np.int32)
        if (slots != NO_SLOT).any():
            batch = dataclasses.replace(batch, lora_slots=slots, lora_loads=self._loads)
            self._loads = ()
        return self._runner.run(batch)
