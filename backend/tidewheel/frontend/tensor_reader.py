"""Requests of one-shot models in a front end: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tidewheel.engine.messages import MAX_REQUEST_ID_CHARS, AddRequest, Delta, EngineInfo, RequestStats
from tidewheel.errors import Cancelled, DeadlineExceeded, InvalidRequest, TidewheelError
from tidewheel.frontend.output import OutputChunk, Outputs, Response
from tidewheel.frontend.request_parameters import AnyTask, GenerateRequest, parse_parameters
from tidewheel.frontend.request_reader import PreparedRequest
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import Arrays
from tidewheel.request import FinishReason
from tidewheel.sampling import SamplingParams


class RemoteCall(Protocol):
    outputs: Arrays | None  # set before `done`, if the call succeeds

    def start(self, done: Callable[[TidewheelError | None], None]) -> None: ...  # `done` is called on any thread


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest(GenerateRequest):
    task: AnyTask = "infer"
    inputs: PackedTensors  # with `call`, without data
    call: RemoteCall | None = None  # of another model with the request's tensors, when the engine says so


class TensorReader:
    """Reader of the requests of a one-shot model. Thread-safe."""

    max_prompt_bytes = 1  # there are no prompts

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def read(self, key: int, request: GenerateRequest, arrival_ns: int) -> PreparedRequest:
        """Return a client request ready to send. Raise `InvalidRequest`."""
        signature = self._info.signature
        if signature is None or not isinstance(request, TensorRequest):
            raise InvalidRequest("a one-shot model takes tensors")
        options = parse_parameters(request.parameters, task=request.task).options
        tensors = ((each.name, each.dtype, each.shape) for each in request.inputs.tensors)
        items = signature.check(tensors, self._info.max_num_batched_tokens)
        message = AddRequest(
            key,
            bytes(4 * items),
            SamplingParams(max_tokens=1),
            inputs=request.inputs,
            options=options,
            arrival_ns=arrival_ns,
            deadline_ns=options.deadline_ns(arrival_ns, request.timeout_us),
            soft_deadline_ns=options.soft_deadline_ns(arrival_ns),
            request_id=request.request_id[:MAX_REQUEST_ID_CHARS],
        )
        return PreparedRequest(message, TensorOutputs(items, arrival_ns, request.call))

    def close(self) -> None:
        pass


class TensorOutputs(Outputs):
    """Outputs of a one-shot request, which come at once. Not thread-safe."""

    def __init__(self, num_items: int, arrival_ns: int, call: RemoteCall | None = None) -> None:
        self.num_input_tokens = num_items
        self._call = call
        self._arrived_ns = arrival_ns
        self._tensors: Arrays | None = None
        self._finish_reason = ""
        self._times: RequestStats | None = None

    @property
    def is_over(self) -> bool:
        return bool(self._finish_reason)

    @property
    def num_output_tokens(self) -> list[int]:
        return [1]

    @property
    def has_tokens(self) -> bool:
        return self._tensors is not None

    def push(self, deltas: Iterable[Delta]) -> list[int]:
        """Take the outputs. Raise `InternalError` if they cannot be read."""
        for delta in deltas:
            if delta.stats is not None:
                self._times = msgspec.structs.replace(delta.stats, arrival_ns=self._arrived_ns)
            if delta.outputs is not None:
                self._tensors = delta.outputs.arrays
            elif delta.finish_reason == FinishReason.LENGTH and self._call is not None:
                self._tensors = self._call.outputs
            if self._tensors is not None:
                self._finish_reason = delta.finish_reason
        return []

    def end(self, finish_reason: str) -> None:
        kind = DeadlineExceeded if finish_reason == FinishReason.DEADLINE else Cancelled
        self.error = kind("the request ended before its outputs were computed")

    def take(self) -> Response:
        return [
            OutputChunk(
                text="",
                tensors=self._tensors,
                num_input_tokens=self.num_input_tokens,
                finish_reason=self._finish_reason or None,
                stats=self._times,
            )
        ]
