"""Requests to a server, one for each prompt, which may have to be sent again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from tritonclient.grpc import service_pb2 as pb

from tidewheel.gateway.bodies import Ask
from tidewheel.gateway.upstream import Passed
from tidewheel_client import codec
from tidewheel_client.errors import DeadlineExceeded

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Order(ABC, Generic[R_co]):
    """One prompt. Its deadline counts from the making of the order."""

    ask: Ask
    request_id: str
    prompt: Mapping[str, object]
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_ms(self) -> float | None:
        """Return the time until the deadline. None: there is none that counts; the backend refuses a wrong one."""
        deadline_ms = self.ask.params.get("deadline_ms")
        if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float) or not deadline_ms > 0:
            return None
        return deadline_ms - 1000 * (time.monotonic() - self.begun)

    def encode(self) -> R_co:
        return self._encode(self.ask.params)

    def encode_again(self) -> R_co:
        """Encode it with the time that is left. Raise `DeadlineExceeded` if that is none."""
        return self._encode(self.params_left())

    def params_left(self) -> Mapping[str, object]:
        """Return the parameters with the time that is left. Raise `DeadlineExceeded` if that is none."""
        left_ms = self.left_ms
        if left_ms is None:
            return self.ask.params
        if left_ms < 1:
            raise DeadlineExceeded(f"deadline_ms is {self.ask.params['deadline_ms']}: it passed as a server was lost")
        return self.ask.params | {"deadline_ms": int(left_ms)}

    @abstractmethod
    def _encode(self, params: Mapping[str, object]) -> R_co: ...


class GrpcOrder(Order[pb.ModelInferRequest]):
    def _encode(self, params: Mapping[str, object]) -> pb.ModelInferRequest:
        ask = self.ask
        request = codec.encode(ask.model, self.request_id, self.prompt, params, stream=ask.stream)
        if ask.traceparent:
            request.parameters["traceparent"].string_param = ask.traceparent
        return request


class HttpOrder(Order[Passed]):
    """One for Triton's `generate`, or for `generate_stream` if its ask streams: the client's own fields."""

    def _encode(self, params: Mapping[str, object]) -> Passed:
        end = "generate_stream" if self.ask.stream else "generate"
        return Passed(
            self.ask.model, f"/v2/models/{self.ask.model}/{end}", msgspec.json.encode({**self.prompt, **params})
        )
