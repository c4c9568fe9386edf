"""Runners of models without tokens, of one step or many, which stand where `ModelRunner` stands."""

import itertools
import logging
import math
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, ModelFailed, NumericError, TidewheelError
from tidewheel.one_shot.adapters import Adapter, load_adapter
from tidewheel.one_shot.signature import DTYPES, Array, Arrays, Signature, TensorSpec
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo

if TYPE_CHECKING:
    from tidewheel.one_shot.diffusion import Denoising, Pipeline

log = logging.getLogger(__name__)

BLOCKS_PER_ROW = 4  # of a model that takes many steps
_ONE_SHOT_BLOCKS = 64  # of a row, so that blocks are not short while steps that ended wait for a slow one before them
_MAX_REASON_CHARS = 300
_MAX_ROOM_BYTES = 64 << 20  # kept for the next batch
_T = TypeVar("_T")


class FinishedRun(NamedTuple):
    tokens: SampledTokens
    is_done: bool = True

    @classmethod
    def of(cls, step_id: int, requests: Sequence[Request]) -> Self:
        """Return the answer for requests that have their outputs or errors."""
        tokens = [0 if request.error is None else SampledTokens.NOT_FINITE for request in requests]
        return cls(SampledTokens(step_id, np.array(tokens, np.int32)))

    def wait(self) -> SampledTokens:
        return self.tokens


class OneShotRunner:
    """Runner of one-shot requests: each step runs a batch of new requests.

    A request takes its outputs or its error. If a batch fails, each of its requests is tried alone, once.
    """

    def __init__(self, adapter: Adapter, signature: Signature, config: EngineConfig) -> None:
        self._config = config
        self._adapter = adapter
        self._signature = signature
        self._may_join = signature.is_batched
        self._rooms: dict[str, Array] = {}  # of joined inputs, by name: new memory costs as much as the copy
        max_items = config.max_num_batched_tokens if signature.is_batched or config.is_remote else 1
        num_rows = config.max_num_seqs if config.is_remote else min(config.max_num_seqs, max_items)
        self.info = RunnerInfo(
            model=config.model,
            architecture=config.adapter,
            device=adapter.device,
            max_model_len=max_items + 1,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max_items,
            block_size=max_items + 1,
            num_blocks=_ONE_SHOT_BLOCKS * num_rows,
            weights_bytes=adapter.weights_bytes,
            signature=signature,
        )

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Load the model. Raise `ConfigError`."""
        begin = time.monotonic()
        runner = cls(*load_adapter(config), config)
        runner._try_item()
        runner.info = msgspec.structs.replace(runner.info, load_seconds=time.monotonic() - begin)
        return runner

    def _try_item(self) -> None:
        """Warn of an item that takes longer than a slice; it is one of zeros, unless only requests tell its size."""
        sizes, slice_ms = self._signature.buckets, self._config.device_slice_ms
        try:
            inputs = {}
            for spec in self._signature.inputs:
                dims = [1 if axis == spec.batch_axis else dim for axis, dim in enumerate(spec.dims)]
                shape = [1 if dim in sizes else int(dim) for dim in dims]
                inputs[spec.name] = np.zeros(shape, DTYPES[spec.dtype])
            item_ms = 1e3 * min(timeit.repeat(lambda: self._run([inputs]), number=1, repeat=3))
        except Exception as error:
            log.info("an item of zeros was not run: %s", reason_of(error))
            return
        if 0.0 < slice_ms < item_ms:
            text = "one item takes %.0f ms, longer than a slice (device_slice_ms %g): other engines wait"
            log.warning(text, item_ms, slice_ms)

    def launch(self, batch: ScheduledBatch) -> FinishedRun:
        """Run the batch's requests, all of which are new."""
        by_row = {new.row: new.request for new in batch.new_rows}
        requests = [by_row[row] for row in batch.rows.tolist()]
        for some in [requests] if self._may_join else [[request] for request in requests]:
            for request, outputs in each_of(some, self._outputs):
                if self._config.check_finite and (error := not_finite(outputs)):
                    request.error = error
                else:
                    request.outputs = outputs
        for request in requests:
            request.inputs = None
        return FinishedRun.of(batch.step_id, requests)

    def _outputs(self, requests: Sequence[Request]) -> list[Arrays]:
        """Run requests as one. Raise what the model raises, or `ValueError` for outputs of other sizes."""
        inputs = [request.inputs or {} for request in requests]
        outputs = self._run(inputs)
        if len(inputs) == 1:
            return [self._cut(outputs, inputs[0])]
        *ends, total = itertools.accumulate(request.num_prompt_tokens for request in requests)  # of their items
        parts: list[dict[str, Array]] = [{} for _ in inputs]
        for spec in self._signature.outputs:
            array, axis = outputs[spec.name], spec.batch_axis or 0
            if array.shape[axis] != total:
                self._may_join = False
                shape = list(array.shape)
                log.warning("%s is %s for %d items: from now on each request runs alone", spec.name, shape, total)
                raise ValueError
            for part, piece in zip(parts, np.split(array, ends, axis), strict=True):
                part[spec.name] = piece
        return list(map(self._cut, parts, inputs))

    def _run(self, inputs: Sequence[Arrays]) -> Arrays:
        feeds = {spec.name: self._joined(spec, inputs) for spec in self._signature.inputs}
        feeds |= {spec.name: feeds[spec.name].reshape(()) for spec in self._adapter.signature.inputs if not spec.dims}
        return {name: np.atleast_1d(array) for name, array in self._adapter.run(feeds).items()}

    def _joined(self, spec: TensorSpec, inputs: Sequence[Arrays]) -> Array:
        """Return an input of several requests in one array: the request's own if it is alone and needs no padding."""
        arrays, axis = [each[spec.name] for each in inputs], spec.batch_axis
        shape = list(self._signature.padded(spec, arrays[0].shape))
        if axis is None:
            arrays = arrays[:1]  # all are equal
        else:
            shape[axis] = sum(array.shape[axis] for array in arrays)
        if shape == list(arrays[0].shape):
            return arrays[0]
        joined, begin = self._room(spec.name, shape, arrays[0].dtype), 0
        for array in arrays:
            place = [slice(size) for size in array.shape]
            if axis is not None:
                place[axis] = slice(begin, begin := begin + array.shape[axis])
            joined[tuple(place)] = array
        return joined

    def _room(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros, or of anything if no input is padded."""
        size = math.prod(shape)
        if self._signature.buckets or dtype.hasobject or size * dtype.itemsize > _MAX_ROOM_BYTES:
            return np.zeros(shape, dtype)
        if name not in self._rooms or len(self._rooms[name]) < size:
            self._rooms[name] = np.empty(size, dtype)
        return self._rooms[name][:size].reshape(shape)

    def _cut(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Cut padding off dimensions that an output shares with a padded input."""
        sizes = self._signature.sizes(inputs) if self._signature.buckets else {}
        if not sizes:
            return outputs
        return {
            spec.name: outputs[spec.name][tuple(slice(sizes.get(str(dim))) for dim in spec.dims)]
            for spec in self._signature.outputs
        }


class RemoteBatch(NamedTuple):
    """Requests that front ends run. Each ends by its report, or by a cancel."""

    step_id: int
    requests: list[Request]

    @property
    def is_done(self) -> bool:
        return all(one.is_finished for one in self.requests)

    def wait(self) -> SampledTokens:
        return SampledTokens(self.step_id, np.zeros(len(self.requests), np.int32))


class RemoteRunner(OneShotRunner):
    """Runner of batches in front ends, any number at a time: they call a model that another backend runs."""

    run: Callable[[Iterable[str]], None]  # by ids of requests; set by the engine's server

    def launch(self, batch: ScheduledBatch) -> RemoteBatch:  # type: ignore[override]
        requests = [new.request for new in batch.new_rows]
        self.run(one.request_id for one in requests)
        return RemoteBatch(batch.step_id, requests)


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
    """Runner of models that take many steps, such as diffusion pipelines: each scheduled row computes one step.

    If a batch fails, each of its requests is tried alone, once.
    """

    def __init__(self, model: "Pipeline", config: EngineConfig, load_seconds: float = 0.0) -> None:
        self._model = model
        self._rows: dict[int, Request] = {}
        num_rows, num_slots = min(config.max_num_seqs, config.max_num_batched_tokens), model.offer.max_steps + 1
        self.info = RunnerInfo(
            model=config.model, architecture=config.adapter, device=model.device,
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


def each_of(requests: Sequence[Request], work: Callable[[Sequence[Request]], list[_T]]) -> list[tuple[Request, _T]]:
    """Return the results of requests together or, if that fails, of each alone, which takes its error."""
    try:
        return list(zip(requests, work(requests), strict=True)) if requests else []
    except Exception as error:
        if len(requests) > 1:
            kind = type(error).__name__  # its text may quote inputs
            log.warning("a batch of %d requests raised %s: each is tried alone", len(requests), kind)
            return [pair for request in requests for pair in each_of([request], work)]
        failure = ModelFailed(f"the model raised an error for this request: {reason_of(error)}")
        requests[0].error = error if isinstance(error, TidewheelError) else failure
        return []


def not_finite(outputs: Arrays) -> NumericError | None:
    for name, array in outputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return NumericError(f"output {name} is not finite (NaN or infinite); only this request is affected")
    return None


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_CHARS]}"


def _states(requests: Sequence[Request]) -> "list[Denoising]":
    return [request.progress.state for request in requests]
