"""The loop of scheduler and runner with adapters in slots that a test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.models import tiny_models
from support.runner.step_loop import StepLoop, poison, request
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.lora import NO_SLOT, Lora, LoraLoad
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep

MAX_LORAS, MAX_RANK = 4, 8
ADAPTERS: Mapping[str, Mapping[str, object]] = {
    "all": {"rank": 4},
    "widest": {"rank": 8, "use_rslora": True},
    "attention": {"rank": 2, "targets": ("q_proj", "v_proj")},
    "last layer": {"rank": 3, "targets": ("k_proj", "up_proj", "down_proj"), "layers": [1]},
}
Answers = dict[str, list[list[int]]]  # tokens by adapter, of the base as ""


class Folders(NamedTuple):
    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]  # with the base as ""


def settings(folder: Path, **changes: object) -> EngineConfig:
    given: dict[str, object] = {
        "dtype": "float32", "device": "cpu", "max_num_seqs": 16, "num_blocks": 64, "block_size": 16, "num_threads": 1,
        "enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": MAX_RANK, **changes,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **given)


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


def requests_of(name: str) -> list[Request]:
    prompts = tiny_models.prompts(4, 1, 40, seed=3)
    return [request(f"{name}/{number}", prompt, 8) for number, prompt in enumerate(prompts)]


def mixed(names: Mapping[str, int]) -> tuple[list[Request], dict[str, int]]:
    """Return the requests of all names in turns, and the slots of those that have an adapter."""
    requests = [each for turn in zip(*map(requests_of, names), strict=True) for each in turn]
    return requests, {each.request_id: names[each.request_id.split("/")[0]] for each in requests}


def check_mixed(
    runner: ModelRunner, folders: Folders, expected: Answers, slots: Mapping[str, int],
    *, loads: bool = True, **settings: object,
) -> None:  # fmt: skip
    """Compare the tokens of requests of the base, and of the adapters of `slots`, in one load."""
    orders = [load(runner, slot, folders.adapters[name]) for name, slot in slots.items() if loads]
    requests, slot_of = mixed({"": NO_SLOT, **slots})
    poison(runner)
    tokens = lora_tokens(runner, requests, slot_of, orders, **settings)
    for name in ("", *slots):
        pairs = zip(tokens, requests, strict=True)
        assert [answer for answer, each in pairs if each.request_id.startswith(f"{name}/")] == expected[name], name
