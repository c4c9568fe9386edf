"""What the cache already holds of a request, as a value."""

from __future__ import annotations

from typing import NamedTuple

from tidewheel.kvcache.sessions import Session


class PrefixHit(NamedTuple):
    """From the first token on: whole blocks of the pool, then whole blocks of the host tier, then a part of a block.

    The part is copied into a block of the row's own, for the row writes the rest of that block (copy on write).
    """

    block_ids: tuple[int, ...]  # of the pool, to be shared
    num_tokens: int  # that need not be computed, with those of the host tier and of the part
    host_keys: tuple[bytes, ...] = ()  # contents in the host tier that come next
    tail_block: int = -1  # the block that holds the part; -1: none in the pool
    tail_key: bytes = b""  # its content in the host tier; empty: none there
    session: Session | None = None  # that the part belongs to; None: a fork's leader, or no part
    num_session_tokens: int = 0  # of `num_tokens`, those that the request's session has

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return len(self.block_ids) + len(self.host_keys)

    @property
    def is_shared_only(self) -> bool:
        """Nothing needs to be copied."""
        return not self.host_keys and self.tail_block < 0 and not self.tail_key


NO_HIT = PrefixHit((), 0)
