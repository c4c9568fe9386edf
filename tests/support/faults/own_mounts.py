"""File systems that only one server has: they can be small or full without harm to the machine."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
from pathlib import Path
from types import TracebackType

from support.triton.serving import Server

_STEP = 1 << 20


def with_mounts(megabytes: dict[str, int]) -> tuple[str, ...]:
    """Return a command that runs the one behind it with file systems of its own at these paths."""
    mounts = [f"mount -t tmpfs -o size={size}m,mode=0700 tmpfs '{path}'" for path, size in megabytes.items()]
    return ("unshare", "--mount", "--map-root-user", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh")


def may_mount() -> bool:
    return subprocess.run([*with_mounts({"/dev/shm": 1}), "true"], capture_output=True, check=False).returncode == 0


class OwnMount:
    """One of them, seen from outside, also after the end of the server."""

    def __init__(self, server: Server, path: str) -> None:
        self._folder = os.open(f"/proc/{server.process.pid}/root{path}", os.O_RDONLY | os.O_DIRECTORY)

    def fill(self) -> None:
        """Take all that is free, again when called again."""
        ballast = os.open("ballast", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=self._folder)
        size, step = os.fstat(ballast).st_size, _STEP
        while step >= os.sysconf("SC_PAGESIZE"):
            try:
                os.posix_fallocate(ballast, size, step)
                size += step
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
        os.close(ballast)

    def free(self) -> None:
        os.unlink("ballast", dir_fd=self._folder)

    def files(self) -> list[str]:
        walked = os.fwalk(".", dir_fd=self._folder)
        return sorted(str(Path(folder, name)) for folder, _, names, _ in walked for name in names)

    def logs(self) -> str:
        """Return the text of all of them."""
        return "".join(self._read(name) for name in self.files() if name.endswith(".log"))

    def _read(self, name: str) -> str:
        with open(name, errors="replace", opener=functools.partial(os.open, dir_fd=self._folder)) as file:
            return file.read()

    def __enter__(self) -> OwnMount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._folder)
