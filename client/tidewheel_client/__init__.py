"""Clients of a Tidewheel server over Triton's gRPC or HTTP endpoints; docs/clients.md has examples."""

from importlib import import_module
from typing import TYPE_CHECKING

from tidewheel_client.answers import Chunk as Chunk
from tidewheel_client.answers import Completion as Completion
from tidewheel_client.answers import Health as Health
from tidewheel_client.answers import LoraState as LoraState
from tidewheel_client.answers import Metadata as Metadata
from tidewheel_client.answers import PerfMetrics as PerfMetrics
from tidewheel_client.answers import Picture as Picture
from tidewheel_client.answers import TokenLogprob as TokenLogprob
from tidewheel_client.errors import Busy as Busy
from tidewheel_client.errors import Cancelled as Cancelled
from tidewheel_client.errors import DeadlineExceeded as DeadlineExceeded
from tidewheel_client.errors import Draining as Draining
from tidewheel_client.errors import EngineDead as EngineDead
from tidewheel_client.errors import InternalError as InternalError
from tidewheel_client.errors import InvalidRequest as InvalidRequest
from tidewheel_client.errors import KvCacheFull as KvCacheFull
from tidewheel_client.errors import NotFound as NotFound
from tidewheel_client.errors import NumericError as NumericError
from tidewheel_client.errors import PromptTooLarge as PromptTooLarge
from tidewheel_client.errors import RequestError as RequestError
from tidewheel_client.errors import RequestTimeout as RequestTimeout
from tidewheel_client.errors import ServerUnavailable as ServerUnavailable
from tidewheel_client.errors import Unsupported as Unsupported
from tidewheel_client.errors import WrongKey as WrongKey

if TYPE_CHECKING:
    from tidewheel_client.async_client import AsyncClient as AsyncClient
    from tidewheel_client.async_client import AsyncSession as AsyncSession
    from tidewheel_client.client import Client as Client
    from tidewheel_client.client import Session as Session
    from tidewheel_client.server_pages import Figures as Figures
    from tidewheel_client.server_pages import Sample as Sample
    from tidewheel_client.stream import AsyncStream as AsyncStream
    from tidewheel_client.stream import Stream as Stream
    from tidewheel_client.transport import Ask as Ask
    from tidewheel_client.transport import MockTransport as MockTransport

# Imported on first use: the engine needs only errors, perhaps without gRPC.
_MODULES = {
    "async_client": ("AsyncClient", "AsyncSession"),
    "client": ("Client", "Session"),
    "server_pages": ("Figures", "Sample"),
    "stream": ("AsyncStream", "Stream"),
    "transport": ("Ask", "MockTransport"),
}
__all__ = [
    *(name for name in list(globals()) if name[0].isupper() and name != "TYPE_CHECKING"),
    *(name for names in _MODULES.values() for name in names),
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tidewheel_client.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
