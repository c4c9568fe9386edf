"""The loop of scheduler and runner with adapters in slots that a test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.runner.step_loop import StepLoop
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.lora import NO_SLOT, Lora, LoraLoad
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep
from tidewheel_kernels.lora import TILE, LoraGroups, LoraMatrices, LoraSizes, LoraStack


def load(runner: ModelRunner, slot: int, folder: Path) -> LoraLoad:
    """Read an adapter for a slot."""
    return LoraLoad(slot, Lora(folder.name, 0, folder, runner.read_lora(folder)))


class LoraRunner:
    """Runner that gives rows the slots of their requests' names, and loads slots before its first step."""

    def __init__(self, runner: ModelRunner, slots: Mapping[str, int], loads: Sequence[LoraLoad] = ()) -> None:
        self.runner, self.info = runner, runner.info
        self._slots, self._loads = slots, tuple(loads)
        self._slot_of_row = np.full(runner.info.max_num_seqs, NO_SLOT, np.int32)

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        for new in batch.new_rows:
            self._slot_of_row[new.row] = self._slots.get(new.request.request_id, NO_SLOT)
        slots = self._slot_of_row[batch.rows]
        if (slots == NO_SLOT).all():
            slots = slots[:0]
        loads, self._loads = self._loads, ()
        return self.runner.launch(dataclasses.replace(batch, lora_slots=slots, lora_loads=loads))

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        return self.launch(batch).wait()


def lora_tokens(
    runner: ModelRunner, requests: Sequence[Request], slots: Mapping[str, int], loads: Sequence[LoraLoad] = (),
    loop: type[StepLoop] = StepLoop, **settings: Any,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of requests with the adapters of `slots`, by name."""
    return loop(LoraRunner(runner, slots, loads), **{"prefix_caching": False, **settings}).run(requests)


class StaticLoraStack(LoraStack):
    """Stack as on a GPU, whose tensors keep their places, on a CPU."""

    def __init__(self, sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, dtype, device)
        num_parts = len(sizes.part_sizes)
        self.a = torch.zeros(sizes.max_loras, num_parts, sizes.max_rank, sizes.in_features, dtype=dtype)
        self.b = torch.zeros(sizes.max_loras, sizes.out_features, sizes.max_rank, dtype=dtype)
        self.num_bytes = self.a.nbytes + self.b.nbytes

    def _set(self, slot: int, parts: Sequence[LoraMatrices | None]) -> None:
        self.a[slot], self.b[slot] = 0, 0
        outputs = self.b[slot].split(self.sizes.part_sizes)
        for index, part in enumerate(parts):
            if part is not None:
                rank = part.a.shape[0]
                self.a[slot, index, :rank], outputs[index][:, :rank] = part

    def matrices(self, slot: int) -> Sequence[LoraMatrices]:
        outputs = self.b[slot].split(self.sizes.part_sizes)
        return [LoraMatrices(*pair) for pair in zip(self.a[slot], outputs, strict=True)]


def add_lora(out: torch.Tensor, x: torch.Tensor, stack: StaticLoraStack, groups: LoraGroups) -> None:
    """Add adapters without a read of values on the host."""
    tokens, slots = groups.tokens.view(-1, TILE), groups.slots.clamp(min=0)
    places = tokens.clamp(min=0).flatten()
    inputs = x.index_select(0, places).float().view(len(slots), TILE, -1)
    hidden = torch.einsum("mti,mpri->mptr", inputs, stack.a.index_select(0, slots).float())
    outputs = stack.b.index_select(0, slots).float().split(stack.sizes.part_sizes, 1)
    sums = torch.cat([hidden[:, p] @ b.transpose(1, 2) for p, b in enumerate(outputs)], -1)
    sums = torch.where((tokens >= 0)[..., None], sums, 0).flatten(0, 1)
    out.copy_(out.float().index_add(0, places, sums))
