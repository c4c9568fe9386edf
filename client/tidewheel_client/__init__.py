"""Client of a Tidewheel server over Triton's gRPC streams.

from tidewheel_client import Client

with Client("127.0.0.1:8001", model="demo") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from tidewheel_client.answers import Chunk, Completion, Metadata, PerfMetrics, TokenLogprob
from tidewheel_client.grpc_client import Client
from tidewheel_client.request_errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineDead,
    InternalError,
    InvalidRequest,
    NotFound,
    NumericError,
    PromptTooLarge,
    RequestError,
    RequestTimeout,
    ServerUnavailable,
    Unsupported,
)
from tidewheel_client.stream import Stream

__all__ = [
    "Busy",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Draining",
    "EngineDead",
    "InternalError",
    "InvalidRequest",
    "Metadata",
    "NotFound",
    "NumericError",
    "PerfMetrics",
    "PromptTooLarge",
    "RequestError",
    "RequestTimeout",
    "ServerUnavailable",
    "Stream",
    "TokenLogprob",
    "Unsupported",
]
