"""Names that hide tokens and words in recordings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b

_STATE_BYTES = 16
_LARGEST = 2**31 - 1
_FIRST = 2  # 0 and 1 are reserved


class PrefixNames:
    """Token names, each drawn from the whole prefix that the token ends.

    BLAKE2b (RFC 7693) is chained from a random secret that is never written; a name shows 31 of a state's 128 bits.
    So guesses at a prompt cannot be tested, and a token has a different name in each place.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.root = os.urandom(_STATE_BYTES) if secret is None else secret

    def extend(self, state: bytes, token_ids: Iterable[int]) -> tuple[bytes, list[int]]:
        """Return the state after a prefix grows (`root`: empty), and the new tokens' names."""
        names = []
        for token_id in token_ids:
            state = blake2b(state + token_id.to_bytes(4, "little"), digest_size=_STATE_BYTES).digest()
            names.append(_name(state))
        return state, names

    def word(self, text: str) -> str:
        """Return the name of a client's word; the empty one stays empty."""
        if not text:
            return ""
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self.root, digest_size=8).hexdigest()


def _name(state: bytes) -> int:
    return max(int.from_bytes(state[:4], "little") & _LARGEST, _FIRST)
