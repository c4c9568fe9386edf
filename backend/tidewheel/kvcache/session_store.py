from __future__ import annotations

from hashlib import sha256

from tidewheel.errors import NotFound
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.prefix import extend_block_hashes, parent_hash, tokens_between
from tidewheel.kvcache.sessions import KVSession, SessionLimits, SessionTable
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.request import Request


class SessionStore(SessionTable):
    """Blocks that sessions keep between turns; the pool counts them as free.

    Under pressure the least recently used session moves to the host tier, or ends. Two requests may use a session at
    once: they share full blocks and copy the partial one.
    """

    def __init__(
        self, pool: BlockPool, host: BlockPool, transfers: TransferQueue, limits: SessionLimits, block_size: int
    ) -> None:
        super().__init__(limits)
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._block_size = block_size

    def keep(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> None:
        """Keep the blocks of the computed tokens, within quotas. End the session if `session_ttl` is 0."""
        if request.session_ttl <= 0.0:
            self.remove(request.tenant, request.session_id)
            return
        session = self._make(request, table, num_computed_tokens, now)
        self._pool.keep(session.blocks)
        self.put(session)

    def _make(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> KVSession:
        size = self._block_size
        num_full = num_computed_tokens // size
        extend_block_hashes(request, num_full, size)
        hashes = request.block_hashes
        # One block of equal contents is found; wrong content is not.
        blocks = self._pool.lookup_prefix(hashes[: self.most_blocks(request.tenant, num_full)])
        keys = tuple(hashes[: len(blocks)])
        parent = parent_hash(request, len(keys))
        tail = b""
        if len(keys) == num_full < self.most_blocks(request.tenant, num_full + 1):
            tail = tokens_between(request, num_full * size, num_computed_tokens)
        tail_key = sha256(parent + tail).digest() if tail else b""
        if tail:
            blocks = (*blocks, table[num_full])
        expires_at = now + request.session_ttl
        return KVSession(request.tenant, request.session_id, parent, keys, tail, tail_key, blocks, expires_at)

    def reclaim(self, num_free_blocks: int) -> None:
        while self._pool.num_free < num_free_blocks:
            session = self.oldest_resident()
            if session is None:
                return
            if self._write_out(session):
                self._pool.release(self.give_up_blocks(session)[::-1])
            else:
                self.remove(*session.name)

    def surrender_tail(self, session: KVSession) -> None:
        self._pool.release(self.give_up_blocks(session, len(session.blocks) - 1))
        session.tail_tokens = session.tail_key = b""

    def close(self, tenant: str, session_id: str) -> None:
        """End a session and free its blocks. Raise `NotFound` if unknown."""
        if not self.remove(tenant, session_id):
            raise NotFound(f"session {session_id!r} is not known: it was never kept, expired, was closed or evicted")

    def _write_out(self, session: KVSession) -> bool:
        blocks = self._pool.lookup_prefix(session.keys)  # wrong content is not found
        keys = session.keys[: len(blocks)]
        if session.tail_tokens and keys == session.keys:
            blocks, keys = (*blocks, session.tail_block), (*keys, session.tail_key)
        return self._transfers.swap_out(blocks, keys) > 0

    def _release(self, session: KVSession) -> None:
        self._pool.release(session.blocks[::-1])
        self._host.drop(session.tail_key)
