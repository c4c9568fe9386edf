"""Calls of another model of the server, for the requests of an entry of `adapter: triton`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from tidewheel.config import EngineConfig
from tidewheel.errors import Busy, ModelFailed, TidewheelError
from tidewheel.one_shot.adapters import load_adapter
from tidewheel.one_shot.runner import not_finite
from tidewheel.one_shot.signature import Arrays, dtype_name

# 32 threads of an instance (`thread-pool-size`, by default in python_backend's src/python_be.cc) pass on
# responses and, each until its answer, calls.
MAX_CALLS = 24
_REFUSALS = ("Exceeds maximum queue size", "timeout expired")  # of its queue, whose code does not arrive
_RETRY_AFTER_MS = 100
_MAX_REASON_CHARS = 300


class CalledModel:
    def __init__(self, config: EngineConfig) -> None:
        self._model, self._checks_finite = config.model, config.check_finite
        self._outputs = load_adapter(config)[1].outputs
        self.threads = ThreadPoolExecutor(MAX_CALLS, "model-call")  # what `async_exec` takes from asyncio

    def call(self, inputs: list[Any], request_id: str) -> dict[str, Any]:
        """Return the outputs (`pb_utils.Tensor`) by name. Raise anything."""
        response = pb_utils.InferenceRequest(
            model_name=self._model,
            requested_output_names=[spec.name for spec in self._outputs],
            inputs=inputs,
            request_id=request_id,
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            reason = response.error().message()
            raise self.failure(reason, Busy if any(words in reason for words in _REFUSALS) else ModelFailed)
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        arrays = {spec.name: tensors[spec.name].as_numpy() for spec in self._outputs}
        for spec, array in zip(self._outputs, arrays.values(), strict=True):
            if dtype_name(array) != spec.dtype or not spec.fits(array.shape):
                found = f"{dtype_name(array)} {list(array.shape)}"
                raise self.failure(f"output {spec.name} is {found}, and config.pbtxt says {spec.describe()}")
        if self._checks_finite and (error := not_finite(arrays)):
            raise error
        return tensors

    def failure(self, reason: str, kind: type[TidewheelError] = ModelFailed) -> TidewheelError:
        text = f"the call of {self._model} failed: {' '.join(reason.split())[:_MAX_REASON_CHARS]}"
        return kind(text, retry_after_ms=_RETRY_AFTER_MS if kind is Busy else None)


class ModelCall:
    """A request's call. Its tensors stay in Triton's memory."""

    def __init__(self, model: CalledModel, request: Any) -> None:
        self.outputs: Arrays | None = None  # `pb_utils.Tensor` in place of arrays
        self._model, self._inputs, self._request_id = model, request.inputs(), request.request_id()

    def start(self, done: Callable[[TidewheelError | None], None]) -> None:
        self._model.threads.submit(self._run, done)

    def discard(self) -> None:
        """Free the tensors of a request that was answered."""
        self._inputs, self.outputs = [], None

    def _run(self, done: Callable[[TidewheelError | None], None]) -> None:
        error = None
        try:
            if inputs := self._inputs:
                self.outputs = self._model.call(inputs, self._request_id)
        except Exception as reason:
            error = reason if isinstance(reason, TidewheelError) else self._model.failure(str(reason))
        done(error)
