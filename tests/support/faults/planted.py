"""The engine process with faults in its steps, as `TIDEWHEEL_FAULTS` may name it: ``-m support.faults.planted``.

The first token of a prompt chooses the fault, the second how many tokens its row samples before.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from tidewheel.batch import ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import LoadedRunner, Progress, load_model_runner
from tidewheel.engine.core import PendingTokens
from tidewheel.engine.process import exit_now, main

if TYPE_CHECKING:
    import torch


class Fault(enum.IntEnum):
    NOT_FINITE = 4001
    RAISES = 4002
    HANGS = 4003
    OUT_OF_MEMORY = 4004
    ABORTS = 4005
    RAISES_IN_LAUNCH = 4006

    def prompt(self, after: int = 5, length: int = 2) -> list[int]:
        return [int(self), after, *[7] * (length - 2)]


class PlantedRunner:
    """A runner whose sampler fails in the rows of prompts that ask for it."""

    def __init__(self, runner: LoadedRunner) -> None:
        from tidewheel.runner import sampler

        self._runner = runner
        self.info = runner.info
        self._faults: dict[int, tuple[Fault, int]] = {}  # by row
        self._num_sampled: Counter[int] = Counter()
        self._sample = sampler.sample_tokens
        vars(sampler)["sample_tokens"] = self._sample_tokens

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        for new in batch.new_rows:
            self._faults.pop(new.row, None)
            self._num_sampled[new.row] = 0
            if int(new.token_ids[0]) in set(Fault):
                self._faults[new.row] = Fault(int(new.token_ids[0])), int(new.token_ids[1])
            if self._faults.get(new.row, (None, 0))[0] is Fault.RAISES_IN_LAUNCH:
                raise RuntimeError("a fault was planted")
        self._sampling_rows = batch.rows[batch.samples].tolist()
        return self._runner.launch(batch)

    def _sample_tokens(self, logits: torch.Tensor, *arguments: Any) -> Any:
        for index, row in enumerate(self._sampling_rows):
            fault, after = self._faults.get(row, (None, 0))
            self._num_sampled[row] += 1
            if fault is not None and self._num_sampled[row] > after:
                _fail(fault, logits, index)
        return self._sample(logits, *arguments)


def _fail(fault: Fault, logits: torch.Tensor, index: int) -> None:
    match fault:
        case Fault.NOT_FINITE:
            logits[index] = float("nan")
        case Fault.RAISES:
            raise RuntimeError("a fault was planted")
        case Fault.HANGS:
            threading.Event().wait()
        case Fault.OUT_OF_MEMORY:
            raise MemoryError("a fault was planted")
        case Fault.ABORTS:
            os.kill(os.getpid(), signal.SIGABRT)


def load(config: EngineConfig, progress: Progress) -> PlantedRunner:
    return PlantedRunner(load_model_runner(config, progress))


if __name__ == "__main__":
    exit_now(main(load=load))
