"""Checks of headers that files of weights share. Imports no torch: the server's own process reads headers, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tidewheel.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000


class HeaderError(ValueError):
    def __init__(self, problem: str, remedy: str = "download it again") -> None:
        super().__init__(f"{problem}; {remedy}")


@contextlib.contextmanager
def as_config_error(path: Path, kind: str = "weight") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except HeaderError as error:
        raise ConfigError(f"{path} is not a valid {kind} file: {error}") from None


def tiled_bytes(ranges: Iterable[tuple[str, int, int]], alignment: int = 1) -> int:
    """Return the size of data that tensors (name, first byte, bytes) tile. Raise `HeaderError` for gaps."""
    end = 0
    for name, begin, size in ranges:
        expected = aligned(end, alignment)
        if begin != expected:
            raise HeaderError(f"{name!r} begins at byte {begin} instead of {expected}")
        end = begin + size
    return end


def aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
