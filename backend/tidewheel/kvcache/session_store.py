"""What sessions keep of the KV cache: blocks in the pool while there is room, then copies in the host tier."""

from __future__ import annotations

from typing import NamedTuple

from tidewheel.errors import NotFound
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.host_tier import HostTier
from tidewheel.kvcache.prefix import extend_block_hashes, root_hash, tail_hash, tokens_between
from tidewheel.kvcache.sessions import Session, SessionLimits, SessionTable
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.request import Request

TOKEN_BYTES = 4


class Tail(NamedTuple):
    """The part of a block that a session has and a request can use."""

    num_tokens: int
    block: int  # in the pool; -1: not there
    key: bytes  # in the host tier; empty: not there


class SessionStore:
    """Keeps, gives up and finds the blocks of sessions.

    The blocks of a session are *kept* in the pool: they count as free, and are given up when nothing else is, of the
    session whose last use is longest ago first. With a host tier they are copied there and the session lives on;
    without one it ends. A session is never written: who resumes it shares its full blocks and copies its tail, so two
    requests may use one session at once. Both find what it has, and it then keeps what the one that ended last had.
    """

    def __init__(
        self, pool: BlockPool, host: HostTier, transfers: TransferQueue, limits: SessionLimits, block_size: int
    ) -> None:
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._block_size = block_size
        self._table = SessionTable(limits)

    def __len__(self) -> int:
        return len(self._table)

    def num_blocks(self, tenant: str) -> int:
        return self._table.num_blocks(tenant)

    def get(self, request: Request) -> Session | None:
        return self._table.get(request.tenant, request.session_id)

    def keep(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> None:
        """The request's session is now its first `num_computed_tokens` tokens, as far as the quotas allow.

        Its full blocks must have their hashes. A session with no time to live ends here.
        """
        if request.session_ttl <= 0.0:
            former = self._table.remove(request.tenant, request.session_id)
            if former is not None:
                self._release(former)
            return
        session = self._make(request, table, num_computed_tokens, now)
        self._pool.keep(session.blocks)
        for gone in self._table.put(session):
            self._release(gone)

    def _make(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> Session:
        size = self._block_size
        num_full = num_computed_tokens // size
        extend_block_hashes(request, num_full, size)
        hashes = request.block_hashes
        # Where two blocks have one content, the one that can be found is the one to keep. What cannot be found was
        # found to be wrong, and ends the session's content.
        blocks = []
        for key in hashes[: self._limited(request.tenant, num_full)]:
            block_id = self._pool.lookup(key)
            if block_id is None:
                break
            blocks.append(block_id)
        keys = tuple(hashes[: len(blocks)])
        parent = keys[-1] if keys else root_hash(request.tenant, request.cache_salt)
        tail = b""
        if len(keys) == num_full < self._limited(request.tenant, num_full + 1):
            tail = tokens_between(request, num_full * size, num_computed_tokens)
        if tail:
            blocks.append(table[num_full])
        return Session(
            tenant=request.tenant,
            session_id=request.session_id,
            parent=parent,
            keys=keys,
            tail_tokens=tail,
            tail_key=tail_hash(parent, tail) if tail else b"",
            blocks=tuple(blocks),
            expires_at=now + request.session_ttl,
        )

    def _limited(self, tenant: str, num_blocks: int) -> int:
        max_blocks = self._table.max_blocks(tenant)
        return num_blocks if max_blocks is None else min(num_blocks, max_blocks)

    def find_tail(self, session: Session, request: Request, num_blocks: int) -> Tail | None:
        """What the session has of the request's tokens behind its first `num_blocks` blocks.

        The digests of these blocks must be known. At least one token is left to compute.
        """
        if not session.tail_tokens or len(session.keys) != num_blocks:
            return None
        parent = request.block_hashes[num_blocks - 1] if num_blocks else root_hash(request.tenant, request.cache_salt)
        if parent != session.parent:
            return None
        start = num_blocks * self._block_size
        stop = min(start + len(session.tail_tokens) // TOKEN_BYTES, request.num_tokens - 1)
        num_tokens = _num_common_tokens(session.tail_tokens, tokens_between(request, start, stop))
        if num_tokens == 0:
            return None
        if session.tail_block >= 0:
            return Tail(num_tokens, session.tail_block, b"")
        return Tail(num_tokens, -1, session.tail_key) if self._host.lookup(session.tail_key) is not None else None

    def num_common_blocks(self, session: Session, request: Request, num_blocks: int) -> int:
        """Of the request's first `num_blocks` blocks, those that are the session's too."""
        count = min(num_blocks, len(session.keys))
        while count and session.keys[count - 1] != request.block_hashes[count - 1]:
            count -= 1
        return count

    def reclaim(self, num_free_blocks: int) -> None:
        """Gives up sessions until that many blocks of the pool are free, or none has blocks any more."""
        while self._pool.num_free < num_free_blocks:
            session = self._table.oldest_resident()
            if session is None:
                return
            if self._write_out(session):
                self._pool.release(self._table.give_up_blocks(session)[::-1])
            else:
                self._table.remove(*session.name)
                self._release(session)

    def surrender_tail(self, session: Session) -> None:
        """The session loses its tail, whose block is free then."""
        self._pool.release(self._table.give_up_blocks(session, len(session.blocks) - 1))
        session.tail_tokens = session.tail_key = b""

    def expire(self, now: float) -> None:
        for session in self._table.expire(now):
            self._release(session)

    def close(self, tenant: str, session_id: str) -> None:
        """Raises `NotFound`."""
        session = self._table.remove(tenant, session_id)
        if session is None:
            raise NotFound(
                f"session {session_id!r} is not known: it was never kept, has expired, was closed or evicted"
            )
        self._release(session)

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks of sessions)."""
        self._table.check_invariants()

    def _write_out(self, session: Session) -> bool:
        """Queues copies to the host tier, the head first; False when not even one block is there afterwards."""
        contents = [(key, self._pool.lookup(key)) for key in session.keys]
        if session.tail_tokens:
            contents.append((session.tail_key, session.tail_block))
        for index, (key, block_id) in enumerate(contents):
            # A content that cannot be found any more was found to be wrong.
            if block_id is None or not self._transfers.swap_out(block_id, key):
                return index > 0
        return True

    def _release(self, session: Session) -> None:
        """Of a session that is no longer in the table."""
        self._pool.release(session.blocks[::-1])
        if session.tail_key:
            self._host.drop(session.tail_key)


def _num_common_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that both have."""
    size = min(len(one), len(other))
    for start in range(0, size, TOKEN_BYTES):
        if one[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]:
            return start // TOKEN_BYTES
    return size // TOKEN_BYTES
