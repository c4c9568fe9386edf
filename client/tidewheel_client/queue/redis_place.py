"""Where a queue's Redis is, how it is connected to, and what its errors mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis import asyncio as redis_asyncio
from redis import exceptions
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.client import Redis
from redis.retry import Retry

from tidewheel_client.errors import Busy, RequestError, ServerUnavailable, Unsupported
from tidewheel_client.queue.embedded_redis import EmbeddedRedis

T = TypeVar("T")

_SCHEMES = ("redis", "rediss", "unix")
_OLDEST = (6, 2)
_OPTIONS: dict[str, Any] = {
    "decode_responses": True, "protocol": 2, "socket_connect_timeout": 5, "socket_timeout": 15,
}  # fmt: skip
_LOST = (
    exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError,
)  # fmt: skip


class RedisPlace:
    """Redis of a URL, or the embedded one of a folder, which this object keeps alive until `close`."""

    def __init__(self, where: str | Path) -> None:
        self._embedded: EmbeddedRedis | None = None
        if isinstance(where, str) and "://" in where:
            self._url, self.shown = where, _check_url(where)
        else:
            self._embedded = EmbeddedRedis(Path(where))
            self._url, self.shown = f"unix://{self._embedded.socket_path}", str(self._embedded.folder)

    def connect(self) -> Redis:
        """Raise `RequestError` for a URL that cannot be used."""
        with self._readable():
            client = Redis.from_url(self._url, retry=Retry(NoBackoff(), 0), **_OPTIONS)
            client.connection_pool.make_connection()  # reads the options, and connects to nothing
            return client

    def connect_async(self) -> redis_asyncio.Redis:
        """Raise `RequestError` for a URL that cannot be used."""
        with self._readable():
            client = redis_asyncio.Redis.from_url(self._url, retry=AsyncRetry(NoBackoff(), 0), **_OPTIONS)
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            return client

    def revive(self) -> None:
        """Start an embedded Redis again if it has died. Raise `ServerUnavailable`."""
        if self._embedded is not None:
            self._embedded.revive()

    def close(self) -> None:
        if self._embedded is not None:
            self._embedded.close()

    def error_of(self, error: exceptions.RedisError) -> RequestError:
        """Return what a call's error means."""
        text = str(error) or type(error).__name__
        if isinstance(error, exceptions.AuthenticationError):
            return RequestError(f"Redis at {self.shown} refuses the user or the password of the URL")
        if isinstance(error, exceptions.OutOfMemoryError):
            return Busy(f"Redis at {self.shown} has no memory left", retry_after_ms=1000)
        if is_lost(error):
            return ServerUnavailable(f"no Redis answers at {self.shown} ({text})")
        return RequestError(f"Redis at {self.shown} refuses: {text}")

    def check_version(self, info: Any) -> None:
        """Raise `Unsupported` for a Redis before 6.2."""
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST:
            raise Unsupported(f"Redis at {self.shown} is {version}: a queue needs 6.2 or later")

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, exceptions.RedisError):  # whose words could hold a part of the password
            raise RequestError(
                f"the URL of Redis at {self.shown} has an option, or a value of one, that is unknown"
            ) from None


def is_lost(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return False
    return isinstance(error, _LOST) or str(error).startswith(("MISCONF", "CLUSTERDOWN", "LOADING"))


def patiently(place: RedisPlace, call: Callable[[], Any]) -> Any:
    """Return what the call returns, tried a second time: calls of a queue may be repeated. Raise `RequestError`."""
    try:
        return call()
    except exceptions.RedisError as error:
        if not isinstance(error, exceptions.ConnectionError) or not is_lost(error):
            raise place.error_of(error) from None
    place.revive()
    try:
        return call()
    except exceptions.RedisError as error:
        raise place.error_of(error) from None


async def heeding_cancels(called: Awaitable[T]) -> T:
    """Await a call of Redis. Raise `CancelledError` if its task was cancelled meanwhile.

    The library sends by `asyncio.wait_for`. That of Python 3.11 loses a cancel that comes as the call ends.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task else 0
    try:
        return await called
    finally:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError


async def patiently_async(place: RedisPlace, call: Callable[[], Awaitable[T]]) -> T:
    """`patiently` of a task."""
    try:
        return await heeding_cancels(call())
    except exceptions.RedisError as error:
        if not isinstance(error, exceptions.ConnectionError) or not is_lost(error):
            raise place.error_of(error) from None
    await asyncio.to_thread(place.revive)
    try:
        return await heeding_cancels(call())
    except exceptions.RedisError as error:
        raise place.error_of(error) from None


def _check_url(url: str) -> str:
    """Return the URL without user, password and options. Raise `RequestError`."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname or 'localhost'}:{parts.port or 6379}" if parts.scheme != "unix" else ""
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("a part of the password is taken for the path")
    except ValueError:
        raise RequestError(
            "the URL of Redis cannot be read: write redis://USER:PASSWORD@HOST:PORT, and / @ : # of a password in %XX"
        ) from None
    if parts.scheme not in _SCHEMES:
        raise RequestError(f"{parts.scheme}:// is no URL of Redis: redis://, rediss:// and unix:// are")
    return f"{parts.scheme}://{host}{parts.path}"
