"""Models that take many steps, such as diffusion pipelines: each scheduled row computes one step."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tidewheel.batch import ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, NumericError
from tidewheel.one_shot.adapters import load_adapter
from tidewheel.one_shot.runner import FinishedRun, each_of, reason_of
from tidewheel.one_shot.signature import Arrays
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo

if TYPE_CHECKING:
    from tidewheel.one_shot.diffusion import Denoising, Pipeline

log = logging.getLogger(__name__)

BLOCKS_PER_ROW = 4


class Progress:
    """Model state and step count of a request, kept while it is preempted."""

    def __init__(self, model: "Pipeline", request: Request) -> None:
        self._model, self._options = model, request.step_options
        self.state = model.prepare(request.inputs or {}, request.seed, self._options)
        self.num_steps = 0

    @property
    def has_output(self) -> bool:
        """Return whether a preview or the result follows the last step."""
        every = self._options.preview_every
        return self.num_steps == self._options.steps or bool(every and self.num_steps % every == 0)

    def with_step(self, outputs: Arrays) -> Arrays:
        return {**outputs, "step": np.array([self.num_steps], np.int32)}

    def deadline_outputs(self) -> Arrays | None:
        """Return the preview at a deadline; None: an error."""
        if self._options.on_deadline == "error" or not self.num_steps:
            return None
        try:
            return self.with_step(self._model.decode([self.state])[0])
        except Exception as error:
            log.warning("the preview at a deadline failed: %s", reason_of(error))
            return None


class IterativeRunner:
    """Runner with `ModelRunner`'s interface. If a batch fails, each of its requests is tried alone, once."""

    def __init__(self, model: "Pipeline", config: EngineConfig, load_seconds: float = 0.0) -> None:
        self._model = model
        self._rows: dict[int, Request] = {}
        num_rows, num_slots = min(config.max_num_seqs, config.max_num_batched_tokens), model.offer.max_steps + 1
        self.info = RunnerInfo(
            model=config.model, architecture=config.adapter, device=model.device, dtype="", vocab_size=1,
            max_model_len=num_slots, max_num_seqs=num_rows, max_num_batched_tokens=num_rows, block_size=num_slots,
            num_blocks=BLOCKS_PER_ROW * num_rows, weights_bytes=model.weights_bytes, load_seconds=load_seconds,
            signature=model.signature, offer=model.offer,
        )  # fmt: skip

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Load the model. Raise `ConfigError`."""
        begin = time.monotonic()
        if config.batch_axes != "{}" or config.buckets != "{}":
            raise ConfigError(f"batch_axes and buckets do not go with adapter {config.adapter}: leave them out")
        model: Any = load_adapter(config)[0]
        return cls(model, config, time.monotonic() - begin)

    def launch(self, batch: ScheduledBatch) -> FinishedRun:
        """Compute a step of each request, and the previews and results that follow."""
        for row in batch.freed_rows.tolist():
            self._rows.pop(row, None)
        self._rows |= {new.row: new.request for new in batch.new_rows}
        requests = [self._rows[row] for row in batch.rows.tolist()]
        for request in requests:
            if request.progress is None:
                for _, progress in each_of([request], lambda new: [Progress(self._model, new[0])]):
                    request.progress, request.inputs = progress, None
        self._advance([request for request in requests if request.error is None])
        return FinishedRun.of(batch.step_id, requests)

    def _advance(self, requests: Sequence[Request]) -> None:
        for request, is_finite in each_of(requests, lambda group: self._model.step(_states(group))):
            request.progress.num_steps += 1
            if not is_finite:
                step = f"step {request.progress.num_steps}"
                request.error = NumericError(f"{step} is not finite (NaN or infinite); only this request is affected")
        shown = [request for request in requests if request.error is None and request.progress.has_output]
        for request, outputs in each_of(shown, lambda group: self._model.decode(_states(group))):
            request.outputs = request.progress.with_step(outputs)


def _states(requests: Sequence[Request]) -> "list[Denoising]":
    return [request.progress.state for request in requests]
