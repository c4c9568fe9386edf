from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raise `OSError` for a pipe or device, whose read might never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_at_most(path: Path, limit: int) -> bytes:
    """Return a regular file's bytes. Raise `OSError` for a pipe or device, or more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are read", str(path))
    return content
