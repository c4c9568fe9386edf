"""Calls of another model of the server, for the requests of an entry of `adapter: triton`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tidewheel.audio_file import SAMPLING_RATE
from tidewheel.batch import Float32Array
from tidewheel.config import EngineConfig
from tidewheel.errors import Busy, ModelFailed, TidewheelError
from tidewheel.frontend.speech import HOP
from tidewheel.one_shot.adapters import load_adapter
from tidewheel.one_shot.runner import not_finite
from tidewheel.one_shot.signature import Arrays, dtype_name

# 32 threads of an instance (`thread-pool-size`, by default in python_backend's src/python_be.cc) pass on
# responses and, each until its answer, calls.
MAX_CALLS = 24
_REFUSALS = ("Exceeds maximum queue size", "timeout expired")  # of its queue, whose code does not arrive
_RETRY_AFTER_MS = 100
_MAX_REASON_CHARS = 300
_STRETCHES = 32  # of audio, at once
_CONTEXT = 64  # samples before each hop
_WARM_UP = 8  # hops before a stretch, whose state begins with zeros


class CalledModel:
    def __init__(self, config: EngineConfig) -> None:
        self.name, self._checks_finite = config.model, config.check_finite
        self._outputs = load_adapter(config)[1].outputs
        self.threads = ThreadPoolExecutor(MAX_CALLS, "model-call")  # what `async_exec` takes from asyncio

    def call(self, inputs: list[Any], request_id: str) -> dict[str, Any]:
        """Return the outputs (`pb_utils.Tensor`) by name. Raise anything."""
        tensors = _called(self.name, inputs, [spec.name for spec in self._outputs], request_id)
        arrays = {spec.name: tensors[spec.name].as_numpy() for spec in self._outputs}
        for spec, array in zip(self._outputs, arrays.values(), strict=True):
            if dtype_name(array) != spec.dtype or not spec.fits(array.shape):
                found = f"{dtype_name(array)} {list(array.shape)}"
                raise _failure(self.name, f"output {spec.name} is {found}, and config.pbtxt says {spec.describe()}")
        if self._checks_finite and (error := not_finite(arrays)):
            raise error
        return tensors


def _called(model: str, inputs: list[Any], outputs: list[str], request_id: str = "") -> dict[str, Any]:
    response = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=outputs,
        inputs=inputs,
        request_id=request_id,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
    ).exec()
    if response.has_error():
        reason = response.error().message()
        raise _failure(model, reason, Busy if any(words in reason for words in _REFUSALS) else ModelFailed)
    return {tensor.name(): tensor for tensor in response.output_tensors()}


def _failure(model: str, reason: str, kind: type[TidewheelError] = ModelFailed) -> TidewheelError:
    text = f"the call of {model} failed: {' '.join(reason.split())[:_MAX_REASON_CHARS]}"
    return kind(text, retry_after_ms=_RETRY_AFTER_MS if kind is Busy else None)


def voice_activity(model: str, samples: Float32Array) -> Float32Array:
    """Return the `Activity` by a model with silero-vad's tensors, over stretches of the audio at once."""
    num_hops = -(-len(samples) // HOP)
    width = -(-num_hops // _STRETCHES)
    padded = np.zeros(_CONTEXT + (_WARM_UP + _STRETCHES * width) * HOP, np.float32)
    padded[_CONTEXT + _WARM_UP * HOP :][: len(samples)] = samples
    steps = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + HOP)[::HOP]
    state, rate = np.zeros((2, _STRETCHES, 128), np.float32), np.array([SAMPLING_RATE], np.int64)
    found = np.zeros((_STRETCHES, width), np.float32)
    for step in range(_WARM_UP + width):
        arrays = {"input": steps[step::width][:_STRETCHES], "state": state, "sr": rate}
        inputs = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
        tensors = _called(model, inputs, ["output", "stateN"])
        state = tensors["stateN"].as_numpy()
        found[:, max(step - _WARM_UP, 0)] = tensors["output"].as_numpy()[:, 0]
    return found.reshape(-1)[:num_hops]


class ModelCall:
    """A request's call. Its tensors stay in Triton's memory."""

    def __init__(self, model: CalledModel, request: Any) -> None:
        self.outputs: Arrays | None = None  # `pb_utils.Tensor` in place of arrays
        self._model, self._inputs, self._request_id = model, request.inputs(), request.request_id()

    def start(self, done: Callable[[TidewheelError | None], None]) -> None:
        self._model.threads.submit(self._run, done)

    def discard(self) -> None:
        self._inputs, self.outputs = [], None

    def _run(self, done: Callable[[TidewheelError | None], None]) -> None:
        error = None
        try:
            if inputs := self._inputs:
                self.outputs = self._model.call(inputs, self._request_id)
        except Exception as reason:
            error = reason if isinstance(reason, TidewheelError) else _failure(self._model.name, str(reason))
        done(error)
