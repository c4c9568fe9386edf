"""Interfaces between a client and what carries its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidewheel_client.answers import Chunk

CALL_TIMEOUT_S = 5.0
END_S = 1.0  # of a request, after its last response


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    model: str
    request_id: str
    prompt: Mapping[str, object]  # by tensor name, as `codec.prompt_input` returns it; perhaps with a `task`
    params: Mapping[str, object] = field(default_factory=dict)  # sampling and serving keys, output flags
    stream: bool = False


class Responses(Protocol):
    """Responses of one request. One thread reads; any may cancel."""

    def receive(self) -> list[Chunk] | None:
        """Wait for a response, and return a chunk for each sequence; None behind the last one, or once cancelled.

        Raise `RequestError`.
        """

    def cancel(self) -> None: ...

    def close(self) -> None:
        """Let what is over end by itself."""


class Transport(Protocol):
    def open(self, ask: Ask, timeout_s: float | None) -> Responses:
        """Send a request. Raise `RequestError`."""

    def call(self, method: str, request: Any) -> Any:
        """Return Triton's answer to a message of its gRPC service. Raise `RequestError`."""

    def close(self) -> None: ...


class AsyncResponses(Protocol):
    """`Responses` of a task."""

    def receive(self) -> Awaitable[list[Chunk] | None]: ...

    def cancel(self) -> None: ...

    async def close(self) -> None: ...


class AsyncTransport(Protocol):
    def open(self, ask: Ask, timeout_s: float | None) -> AsyncResponses: ...

    async def call(self, method: str, request: Any) -> Any: ...

    async def close(self) -> None: ...


def is_cancelling() -> bool:
    """Return whether the task itself is cancelled, and not only its request."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
