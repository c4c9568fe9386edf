"""Names for tokens and for words in a recording: equal for equal contents, and telling nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b

_STATE_BYTES = 16
_LARGEST = 2**31 - 1
_FIRST = 2  # 0 and 1 have a meaning of their own in a recording


class PrefixNames:
    """A token's name is drawn from all tokens up to it: BLAKE2b (RFC 7693) chained from a random secret that is never
    written. 31 bits of each state of 128 are shown, so that nobody without the secret can try out what a prompt may
    have said, and the same token has another name in another place."""

    def __init__(self, secret: bytes | None = None) -> None:
        self.root = os.urandom(_STATE_BYTES) if secret is None else secret

    def extend(self, state: bytes, token_ids: Iterable[int]) -> tuple[bytes, list[int]]:
        """From the state of a prefix (`root`: nothing) to that of a longer one, and the names of the new tokens."""
        names = []
        for token_id in token_ids:
            state = blake2b(state + token_id.to_bytes(4, "little"), digest_size=_STATE_BYTES).digest()
            names.append(_name(state))
        return state, names

    def word(self, text: str) -> str:
        """For names that clients choose; the empty one stays empty."""
        if not text:
            return ""
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self.root, digest_size=8).hexdigest()


def _name(state: bytes) -> int:
    return max(int.from_bytes(state[:4], "little") & _LARGEST, _FIRST)
