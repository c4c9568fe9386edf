"""Clients of a Tidewheel server, over Triton's gRPC streams or its HTTP endpoints.

from tidewheel_client import Client

with Client("127.0.0.1:8001", model="demo") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel_client.answers import Chunk, Completion, Metadata, PerfMetrics, TokenLogprob
from tidewheel_client.async_client import AsyncClient, AsyncSession
from tidewheel_client.client import Client, Session
from tidewheel_client.mock_transport import AsyncMockTransport, MockTransport
from tidewheel_client.request_errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    InternalError,
    InvalidRequest,
    KvCacheFull,
    NotFound,
    NumericError,
    PromptTooLarge,
    RequestError,
    RequestTimeout,
    ServerUnavailable,
    Unsupported,
    WrongKey,
)
from tidewheel_client.server_pages import Figures, Health, Sample
from tidewheel_client.stream import AsyncStream, Stream
from tidewheel_client.transport import Ask

if TYPE_CHECKING:
    from tidewheel_client.queue import AsyncQueue, Queue

__all__ = [
    "Ask",
    "AsyncClient",
    "AsyncMockTransport",
    "AsyncQueue",
    "AsyncSession",
    "AsyncStream",
    "Busy",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Draining",
    "EngineDead",
    "Figures",
    "Health",
    "InternalError",
    "InvalidRequest",
    "KvCacheFull",
    "Metadata",
    "MockTransport",
    "NotFound",
    "NumericError",
    "PerfMetrics",
    "PromptTooLarge",
    "Queue",
    "RequestError",
    "RequestTimeout",
    "Sample",
    "ServerUnavailable",
    "Session",
    "Stream",
    "TokenLogprob",
    "Unsupported",
    "WrongKey",
]


def __getattr__(name: str) -> object:
    """Import the queue, which needs an extra, when it is asked for."""
    if name not in ("AsyncQueue", "Queue"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidewheel_client import queue

    return getattr(queue, name)
