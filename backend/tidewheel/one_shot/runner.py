import itertools
import logging
import math
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ModelFailed, NumericError, TidewheelError
from tidewheel.one_shot.adapters import Adapter, load_adapter
from tidewheel.one_shot.signature import DTYPES, Array, Arrays, Signature, TensorSpec
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo

log = logging.getLogger(__name__)

_BLOCKS_PER_ROW = 64  # so that blocks are not short while steps that ended wait for a slow one before them
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
    """Runner of one-shot requests, which stands where `ModelRunner` stands: each step runs a batch of new requests.

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
            num_blocks=_BLOCKS_PER_ROW * num_rows,
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
            inputs = {
                spec.name: np.zeros(
                    [
                        1 if axis == spec.batch_axis or dim in sizes else int(dim)
                        for axis, dim in enumerate(spec.dims)
                    ],
                    DTYPES[spec.dtype],
                )
                for spec in self._signature.inputs
            }
            item_ms = 1e3 * min(timeit.repeat(lambda: self._run([inputs]), number=1, repeat=3))
        except Exception as error:
            log.info("an item of zeros was not run: %s", reason_of(error))
            return
        if 0.0 < slice_ms < item_ms:
            text = (
                "one item takes %.0f ms, longer than a slice (device_slice_ms %g): other engines of the device wait"
            )
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
        counts = [request.num_prompt_tokens for request in requests]  # items
        ends = list(itertools.accumulate(counts))
        for spec in self._signature.outputs:
            if outputs[spec.name].shape[spec.batch_axis or 0] != ends[-1]:
                self._may_join = False
                shape = list(outputs[spec.name].shape)
                log.warning("%s is %s for %d items: from now on each request runs alone", spec.name, shape, ends[-1])
                raise ValueError
        spans = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        parts = [
            {spec.name: _part(spec, outputs[spec.name], *span) for spec in self._signature.outputs} for span in spans
        ]
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


def _part(spec: TensorSpec, array: Array, begin: int, end: int) -> Array:
    return array[(*[slice(None)] * (spec.batch_axis or 0), slice(begin, end))]


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON_CHARS]}"
