"""What pool, host tier and sessions hold of a request. Changes none of them."""

from __future__ import annotations

from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.hits import PrefixHit
from tidewheel.kvcache.host_tier import HostTier
from tidewheel.kvcache.prefix import extend_block_hashes, max_hit_blocks
from tidewheel.kvcache.session_store import SessionStore
from tidewheel.request import Request


class PrefixFinder:
    def __init__(self, pool: BlockPool, host: HostTier, sessions: SessionStore, block_size: int) -> None:
        self._pool = pool
        self._host = host
        self._sessions = sessions
        self._block_size = block_size

    def find(self, request: Request) -> PrefixHit:
        """Whole blocks of the pool, then of the host tier, then the tail of the request's session; one token at least
        is left out."""
        limit = max_hit_blocks(request.num_tokens, self._block_size)
        extend_block_hashes(request, limit, self._block_size)
        block_ids = []
        for block_hash in request.block_hashes[:limit]:
            block_id = self._pool.lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        host_keys: tuple[bytes, ...] = ()
        if self._host.num_contents:
            host_keys = self._find_in_host(request.block_hashes[len(block_ids) : limit])
        num_blocks = len(block_ids) + len(host_keys)
        hit = PrefixHit(tuple(block_ids), num_blocks * self._block_size, host_keys)
        return self._with_session(hit, request) if request.session_id else hit

    def estimate(self, request: Request) -> int:
        """Estimate the tokens of `find`, by binary search: a block is rarely there without those before it."""
        limit = max_hit_blocks(request.num_tokens, self._block_size)
        extend_block_hashes(request, limit, self._block_size)
        hashes = request.block_hashes
        found, missing = 0, limit + 1  # blocks that are there, and the first that is not
        while found + 1 < missing:
            middle = (found + missing) // 2
            key = hashes[middle - 1]
            if self._pool.lookup(key) is not None or self._host.lookup(key) is not None:
                found = middle
            else:
                missing = middle
        return found * self._block_size

    def _find_in_host(self, keys: list[bytes]) -> tuple[bytes, ...]:
        count = 0
        while count < len(keys) and self._host.lookup(keys[count]) is not None:
            count += 1
        return tuple(keys[:count])

    def _with_session(self, hit: PrefixHit, request: Request) -> PrefixHit:
        session = self._sessions.get(request)
        if session is None:
            return hit
        num_common = self._sessions.num_common_blocks(session, request, hit.num_blocks) * self._block_size
        tail = self._sessions.find_tail(session, request, hit.num_blocks)
        if tail is None:
            return hit._replace(num_session_tokens=num_common)
        return hit._replace(
            num_tokens=hit.num_tokens + tail.num_tokens,
            tail_block=tail.block,
            tail_key=tail.key,
            session=session,
            num_session_tokens=num_common + tail.num_tokens,
        )
