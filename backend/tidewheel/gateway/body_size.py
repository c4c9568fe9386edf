"""Bound on the work that a body asks for: bytes alone say little of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidewheel_client.errors import InvalidRequest

# Together some 50 ms of parsing.
MAX_CONTAINERS = 1 << 15  # lists, objects and keys
MAX_ITEMS = 1 << 18  # such as the token ids of a prompt
_SMALL = 1 << 14  # bytes of a body that cannot hold too much
_PIECE = 1 << 18  # bytes of one pass, between which other threads run
_ESCAPE = re.compile(rb"\\*[^\\]?")  # its rest, and what it is for


def check_structure(data: bytes) -> None:
    """Raise `InvalidRequest` for more than is parsed in time. Characters within strings count for nothing."""
    if len(data) <= _SMALL or _fits(_pieces(data)) or _fits(_outside_strings(data)):
        return
    raise InvalidRequest(
        f"the body has more than {MAX_CONTAINERS} lists, objects and keys, or {MAX_ITEMS} values: send fewer"
    )


def _fits(pieces: Iterator[bytes]) -> bool:
    num_containers = num_items = 0
    for piece in pieces:
        num_containers += sum(map(piece.count, (b"[", b"{", b":")))
        num_items += piece.count(b",")
        if num_containers > MAX_CONTAINERS or num_items > MAX_ITEMS:
            return False
    return True


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut no escape."""
    start = 0
    while start < len(data):
        match = _ESCAPE.match(data, min(start + _PIECE, len(data)))
        assert match is not None
        yield data[start : match.end()]
        start = match.end()


def _outside_strings(data: bytes) -> Iterator[bytes]:
    is_inside = 0
    for piece in _pieces(data):
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = bare.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1
