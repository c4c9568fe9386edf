import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tidewheel.errors import ConfigError

MAX_FILE_BYTES = 256 << 20  # the largest tokenizer.json has about 35 MB


@contextlib.contextmanager
def as_config_error(what: object, remedy: str = "download it again") -> Iterator[None]:
    """Turn an `OSError`, or a `ValueError` about a file's content, into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or what} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: {error}; {remedy}") from None


def open_regular(path: Path) -> BinaryIO:
    """Raise `OSError` for a pipe or device, whose read might never end."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file; a new one has mode 0600. Raise `OSError` for a pipe or device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_at_most(path: Path, limit: int) -> bytes:
    """Return a regular file's bytes. Raise `OSError` for a pipe or device, or more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are read", str(path))
    return content


def read_text(path: Path, limit: int = MAX_FILE_BYTES) -> str | None:
    """Return a file's UTF-8 text, or None if missing. Raise `ConfigError` for an unreadable file."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_at_most(path, limit)), "utf-8").read()  # with one kind of line end
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_object(path: Path, limit: int = MAX_FILE_BYTES) -> dict[str, object]:
    """Return a file's JSON object, empty if the file is missing. Raise `ConfigError` for other content."""
    text = read_text(path, limit)
    return {} if text is None else parse_object(text, str(path))


def parse_object(text: str, name: str) -> dict[str, object]:
    """Parse a JSON object. Raise `ConfigError` that begins with `name` for other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} holds a {type(value).__name__}: it must be a JSON object")
    return value
