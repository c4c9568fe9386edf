"""Clients of a Tidewheel server over Triton's gRPC or HTTP endpoints; docs/clients.md has examples."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tidewheel_client.answers import Chunk, Completion, Metadata, PerfMetrics, TokenLogprob
from tidewheel_client.errors import (
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

if TYPE_CHECKING:
    from tidewheel_client.async_client import AsyncClient, AsyncSession
    from tidewheel_client.client import Client, Session
    from tidewheel_client.mock_transport import AsyncMockTransport, MockTransport
    from tidewheel_client.server_pages import Figures, Health, Sample
    from tidewheel_client.stream import AsyncStream, Stream
    from tidewheel_client.transport import Ask

__all__ = [
    "Ask",
    "AsyncClient",
    "AsyncMockTransport",
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


# Imported on first use: the engine needs only errors, perhaps without gRPC.
_MODULES = {
    "async_client": ("AsyncClient", "AsyncSession"),
    "client": ("Client", "Session"),
    "mock_transport": ("AsyncMockTransport", "MockTransport"),
    "server_pages": ("Figures", "Health", "Sample"),
    "stream": ("AsyncStream", "Stream"),
    "transport": ("Ask",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tidewheel_client.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
