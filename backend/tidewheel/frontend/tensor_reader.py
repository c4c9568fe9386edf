"""Requests of one-shot models in a front end: tensors in, tensors out."""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tidewheel.engine.messages import MAX_REQUEST_ID_CHARS, AddRequest, Delta, EngineInfo, RequestStats
from tidewheel.errors import Cancelled, DeadlineExceeded, InvalidRequest, TidewheelError
from tidewheel.frontend.coercion import ParameterSource, show
from tidewheel.frontend.output import OutputChunk, Outputs, Response
from tidewheel.frontend.request_parameters import (
    ALIASES,
    COERCIONS,
    COERCIONS_BY_KIND,
    GenerateRequest,
    RemoteCall,
    parse_parameters,
)
from tidewheel.frontend.request_reader import PreparedRequest
from tidewheel.one_shot.signature import Array, Arrays, StepOptions
from tidewheel.parameters import fields_of
from tidewheel.request import FinishReason
from tidewheel.sampling import SamplingParams

_ONE_STEP = SamplingParams(max_tokens=1)
_STEP_COERCIONS = {name: COERCIONS_BY_KIND[field.kind] for name, field in fields_of(StepOptions).items()}


class TensorReader:
    """Reader of the requests of a one-shot model. Thread-safe."""

    max_prompt_bytes = 1  # there are no prompts

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def read(self, key: int, request: GenerateRequest) -> PreparedRequest:
        """Return a client request ready to send. Raise `InvalidRequest`."""
        signature = self._info.signature
        if signature is None or request.inputs is None:
            raise InvalidRequest("a one-shot model takes tensors")
        offer, (step_options, sources) = self._info.offer, (None, request.parameters)
        if offer is not None:
            given, sources = _take_step_options(request.parameters)
            step_options = offer.completed(given)
            if step_options.preview_every and not request.stream:
                raise InvalidRequest("previews are set, and this model answers once: use the decoupled model")
        options = parse_parameters(sources, task=request.task).options
        tensors = tuple((each.name, each.dtype, each.shape) for each in request.inputs.tensors)
        items = signature.check(tensors, self._info.max_num_batched_tokens)
        message = AddRequest(
            key,
            bytes(4 * items),
            SamplingParams(seed=step_options.seed, max_tokens=step_options.steps) if step_options else _ONE_STEP,
            inputs=request.inputs,
            step_options=step_options,
            options=options,
            arrival_ns=request.arrival_ns,
            deadline_ns=options.deadline_ns(request.arrival_ns, request.timeout_us),
            soft_deadline_ns=options.soft_deadline_ns(request.arrival_ns),
            request_id=request.request_id[:MAX_REQUEST_ID_CHARS],
        )
        return PreparedRequest(message, TensorOutputs(items, request.call, step_options))

    def close(self) -> None:
        pass


def _take_step_options(sources: Sequence[ParameterSource]) -> tuple[StepOptions, tuple[ParameterSource, ...]]:
    """Return the parameters of a model that takes many steps, and the others. Raise `InvalidRequest`."""
    values = {name: value for source in sources for name, value in source.values.items() if value is not None}
    if unknown := sorted(values.keys() - _STEP_COERCIONS.keys() - COERCIONS.keys() - ALIASES.keys()):
        known = f"{', '.join(_STEP_COERCIONS)}, and options of one-shot models"
        raise InvalidRequest(f"unknown parameter {show(unknown[0])}: known are {known}")
    given: dict[str, Any] = {
        name: coerce(name, values.pop(name)) for name, coerce in _STEP_COERCIONS.items() if name in values
    }
    return StepOptions(**given), (ParameterSource(origin="parameters", values=values),)


class TensorOutputs(Outputs):
    """Outputs of a request without text: all at once or, of many steps, previews before them. Not thread-safe."""

    is_over = False

    def __init__(self, num_items: int, call: RemoteCall | None = None, options: StepOptions | None = None) -> None:
        self.num_input_tokens = num_items
        self._options = options  # of many steps
        self._call = call
        self._tensors: Arrays | None = None
        self._finish_reason = ""
        self._num_steps = 0 if call is None else 1  # no step reports a call
        self._times: RequestStats | None = None

    @property
    def num_output_tokens(self) -> list[int]:
        return [self._num_steps]

    @property
    def has_tokens(self) -> bool:
        return self._tensors is not None

    def push(self, deltas: Iterable[Delta]) -> list[int]:
        """Take the outputs. Raise `InternalError` if they cannot be read."""
        for delta in deltas:
            self._num_steps += len(delta.token_ids)
            self._times = delta.stats or self._times
            if delta.outputs is not None:
                self._tensors = delta.outputs.arrays
            elif delta.finish_reason:
                call = self._call if delta.finish_reason == FinishReason.LENGTH else None
                self._tensors = None if call is None else call.outputs  # not an unsent preview
            if self._tensors is not None:
                self._finish_reason, self.is_over = delta.finish_reason, bool(delta.finish_reason)
        return []

    def end(self, finish_reason: str) -> TidewheelError:
        kind = DeadlineExceeded if finish_reason == FinishReason.DEADLINE else Cancelled
        return kind("the request ended before its outputs were computed")

    def take(self) -> Response:
        """Return the tensors that came last; a picture once."""
        tensors = self._tensors
        if self._options is not None:
            tensors, self._tensors = _as_picture(tensors or {}, self._options, self._finish_reason), None
        return [
            OutputChunk(
                text="",
                tensors=tensors,
                num_input_tokens=self.num_input_tokens,
                finish_reason=self._finish_reason or None,
                stats=self._times,
            )
        ]


def _as_picture(tensors: Arrays, options: StepOptions, finish_reason: str) -> Arrays:
    """Return a preview or the result in the form that is asked for, with its steps and finish reason."""
    shown, reason = dict(tensors), finish_reason or "None"
    if options.format != "raw":
        png = encode_png(shown.pop("image"))
        shown["png"] = np.array([png if options.format == "png" else base64.b64encode(png)], np.object_)
    shown["steps"] = np.array([options.steps], np.int32)
    text = b"stop" if reason == FinishReason.LENGTH else reason.encode()
    shown["finish_reason"] = np.array([text], np.object_)
    return shown


def encode_png(image: Array) -> bytes:
    """Return uint8 [height, width, channels], of 1 (grey), 3 (RGB) or 4 (RGBA), as a PNG file."""
    from PIL import Image  # comes with the extra diffusers

    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()
