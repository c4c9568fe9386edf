"""Triton's `generate` and `generate_stream`, passed on to a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import msgspec

from tidewheel.gateway.answers import STREAM_HEADERS, StreamWriter
from tidewheel.gateway.bodies import Fields, check_parameters
from tidewheel.gateway.errors import triton_body
from tidewheel.gateway.upstream import ProxiedRequest, Upstream
from tidewheel.gateway.upstream_request import Attempt, UpstreamRequest
from tidewheel_client.errors import InvalidRequest, RequestError

_PROMPTS = ("text_input", "input_ids", "messages")  # a router reads them


class ProxyAttempt(Attempt[bytes]):
    """Attempt by HTTP; responses are parts of the body."""

    message: ProxiedRequest

    def _encode(self, params: Mapping[str, object]) -> None:
        method = "generate_stream" if self.request.stream else "generate"
        body = msgspec.json.encode({**self.request.prompts[0], **params})
        self.message = ProxiedRequest(f"/v2/models/{self.request.model}/{method}", body)

    def _send(self, upstream: Upstream) -> AsyncGenerator[bytes]:
        return upstream.generate(self.message)


class ProxyWriter(StreamWriter[bytes]):
    def __init__(self, request: UpstreamRequest) -> None:
        self.headers = STREAM_HEADERS if request.stream else {"Content-Type": "application/json"}

    def events(self, index: int, response: bytes) -> bytes:  # noqa: ARG002
        return response

    def end(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return b"data: " + triton_body(error) + b"\n\n"


def read_generate(fields: Fields) -> UpstreamRequest:
    return _read(fields, stream=False)


def read_stream(fields: Fields) -> UpstreamRequest:
    return _read(fields, stream=True)


def _read(fields: Fields, *, stream: bool) -> UpstreamRequest:
    fields = _flat(fields)
    params = {name: value for name, value in fields.items() if name not in _PROMPTS}
    check_parameters(params)
    prompt: dict[str, object] = {name: fields[name] for name in _PROMPTS if name in fields}
    session = params.get("session_id")
    return UpstreamRequest(
        prompts=[prompt], params=params, session=session if isinstance(session, str) else "", stream=stream
    )


def _flat(fields: Fields) -> Fields:
    """Move `parameters` to the top level, where API keys check them. Raise `InvalidRequest`."""
    nested = fields.get("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters must be an object of parameters")
    if twice := sorted(nested.keys() & fields.keys()):
        raise InvalidRequest(f"{twice[0]} stands in parameters and beside it: give it once")
    return {name: value for name, value in fields.items() if name != "parameters"} | nested
