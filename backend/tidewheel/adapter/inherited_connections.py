from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def is_stub() -> bool:
    """Return whether this process is one of Triton's, and no test."""
    return Path("/proc/self/exe").readlink().name.startswith("triton_python_backend_stub")


def close_inherited_connections() -> None:
    """Close the connections of Triton's clients: a stub is a fork of Triton, and would keep them open for its life.

    A client that reads to the end of its connection would wait as long. Call it before this process opens its own.
    """
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the one of the listing
            if stat.S_ISSOCK(path.stat().st_mode):
                _close(int(path.name))


def _close(descriptor: int) -> None:
    found = socket.socket(fileno=descriptor)
    if found.family in _INTERNET:
        found.close()
    else:
        found.detach()
