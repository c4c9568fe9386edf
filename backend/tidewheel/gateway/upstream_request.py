"""Request on its way through the gateway, and the attempts to answer it."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import msgspec
from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.router import RouteRequest, chunk_hashes
from tidewheel.gateway.upstream import Upstream
from tidewheel.request import Priority
from tidewheel_client import Chunk, codec
from tidewheel_client.errors import DeadlineExceeded, RequestError, ServerUnavailable

BYTES_PER_TOKEN = 4  # roughly, of text; also of a token id
CHUNK_TOKENS = 256
_CLASSES = {str(one.value): one for one in Priority}

R = TypeVar("R")  # a server's response


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, as in vLLM


@dataclass(slots=True, kw_only=True)
class UpstreamRequest:
    """Client's request, of which each prompt is sent by itself."""

    prompts: list[dict[str, object]]  # tensors by name
    params: dict[str, object]  # read by the backend
    model: str = ""  # empty: the only one
    request_id: str = ""
    session: str = ""
    traceparent: str = ""  # W3C header
    stream: bool = False
    begun: float = field(default_factory=time.monotonic)  # start of `deadline_ms`
    # How the answer is written:
    is_chat: bool = False
    n: int = 1
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    top_logprobs: int | None = None  # None: no log-probabilities
    has_echo: bool = False
    shows_prompt_logprobs: bool = False
    tools: frozenset[str] | None = None  # function names; None: calls are text
    has_one_call: bool = False
    follows_grammar: bool = False
    schema_name: str = ""  # of a forced call, for messages
    dimensions: int | None = None  # of embeddings; None: all
    in_base64: bool = False  # embeddings

    @property
    def size(self) -> int:
        """Characters and token ids of all prompts."""
        values = (value for prompt in self.prompts for value in prompt.values())
        return sum(len(value) for value in values if isinstance(value, str | list))

    def id_of(self, index: int) -> str:
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{index}"

    @property
    def left_ms(self) -> float | None:
        """Deadline's rest; None: no deadline, or one that the backend refuses."""
        deadline_ms = self.params.get("deadline_ms")
        if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float) or not deadline_ms > 0:
            return None
        return deadline_ms - 1000 * (time.monotonic() - self.begun)

    def params_left(self) -> Mapping[str, object]:
        """Raise `DeadlineExceeded`."""
        left_ms = self.left_ms
        if left_ms is None:
            return self.params
        if left_ms < 1:
            raise DeadlineExceeded(f"deadline_ms is {self.params['deadline_ms']}: it passed as a server was lost")
        return self.params | {"deadline_ms": int(left_ms)}


class Attempt(ABC, Generic[R]):
    """Prompt on its way to a server, and to others until a response is delivered."""

    def __init__(self, request: UpstreamRequest, index: int = 0) -> None:
        self.request = request
        self.index = index  # of the prompt
        self.route = route_request(request, index)
        self.refused: list[Upstream] = []
        self.has_delivered = False
        self._encode(request.params)

    @classmethod
    def of_prompts(cls, request: UpstreamRequest) -> list[Self]:
        return [cls(request, index) for index in range(len(request.prompts))]

    def encode_again(self) -> None:
        """Prepare for another server. Raise `DeadlineExceeded`."""
        self._encode(self.request.params_left())

    @contextlib.asynccontextmanager
    async def sent_to(self, upstream: Upstream) -> AsyncIterator[AsyncGenerator[R]]:
        """Yield the server's responses; a `RequestError` excludes the server.

        A lost server gets no requests until the next look.
        """
        try:
            async with contextlib.aclosing(self._send(upstream)) as responses:
                yield responses
        except RequestError as error:
            if isinstance(error, ServerUnavailable):
                upstream.not_ready = str(error)
            self.refused.append(upstream)
            raise

    @abstractmethod
    def _encode(self, params: Mapping[str, object]) -> None: ...

    @abstractmethod
    def _send(self, upstream: Upstream) -> AsyncGenerator[R]: ...

    def cached_tokens(self, response: R) -> int | None:  # noqa: ARG002
        """Return the cached tokens, in tokens of the route. None: unknown."""
        return None


class GrpcAttempt(Attempt[list[Chunk]]):
    message: pb.ModelInferRequest

    def _encode(self, params: Mapping[str, object]) -> None:
        request = self.request
        prompt, request_id = request.prompts[self.index], request.id_of(self.index)
        self.message = codec.encode(request.model, request_id, prompt, params, stream=request.stream)
        if request.traceparent:
            self.message.parameters["traceparent"].string_param = request.traceparent

    def _send(self, upstream: Upstream) -> AsyncGenerator[list[Chunk]]:
        return upstream.stream(self.message)

    def cached_tokens(self, response: list[Chunk]) -> int | None:
        for chunk in response:
            if chunk.perf is not None and chunk.index == 0 and chunk.num_input_tokens:
                return self.route.num_tokens * chunk.perf.num_cached_tokens // chunk.num_input_tokens
        return None


def route_request(request: UpstreamRequest, index: int = 0) -> RouteRequest:
    """Return a prompt for a router, with estimated tokens: the gateway has no tokenizer."""
    data = b"".join(map(_bytes, request.prompts[index].values()))
    tenant, salt = (str(request.params.get(name, "")) for name in ("tenant", "cache_salt"))
    return RouteRequest(
        session=request.session,
        tenant=tenant,
        priority=_CLASSES.get(str(request.params.get("priority")), Priority.NORMAL),
        num_tokens=max(len(data) // BYTES_PER_TOKEN, 1),
        chunks=chunk_hashes(data, CHUNK_TOKENS * BYTES_PER_TOKEN, tenant, salt),
        chunk_tokens=CHUNK_TOKENS,
    )


def _bytes(value: object) -> bytes:
    """Return a tensor's bytes, none if malformed."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    try:
        return array("i", value).tobytes()  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError):
        return b""
