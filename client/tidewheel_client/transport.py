"""Interface between a client and its connection to a server.

A synchronous client's transport blocks and never suspends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidewheel_client.answers import Chunk

CALL_TIMEOUT_S = 5.0
END_S = 1.0  # of a request, after its last response
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    model: str
    request_id: str
    prompt: Mapping[str, object]  # from `codec`, perhaps with a `task`
    params: Mapping[str, object] = field(default_factory=dict)  # sampling and serving keys, flags
    stream: bool = False
    as_parameters: bool = False  # send `params` as the request's parameters, not in tensors


class Responses(Protocol):
    """Responses to one request. One task or thread reads; any may cancel."""

    def receive(self) -> Awaitable[list[Chunk] | None]:
        """Return a chunk per sequence; None after the end or a cancel. Raise `RequestError`."""

    def cancel(self) -> None: ...

    async def close(self) -> None:
        """Read a finished request's responses to the end."""


class Transport(Protocol):
    def open(self, ask: Ask, timeout_s: float | None) -> Responses:
        """Send a request. Raise `RequestError`."""

    async def call(self, method: str, request: Any) -> Any:
        """Return Triton's answer to a gRPC message. Raise `RequestError`."""

    async def close(self) -> None: ...


def is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
