"""Cached prefixes by digests of full blocks, chained by SHA-256.

    root = H(domain, tenant, salt)        h_0 = H(root, tokens of block 0)        h_i = H(h_{i-1}, tokens of block i)

SHA-256 is collision-safe, unlike `hash()` (CVE-2025-25183). Tenants and salts share no block. Quantised weights have
the root H(root, "quantized").
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from tidewheel.batch import WeightVariant
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.pauses import Pause
from tidewheel.request import Request

_DOMAIN = b"tidewheel kv block v2\0"


def root_hash(tenant: str, salt: str) -> bytes:
    """Return the digest before block 0. It covers the tenant's length: no two (tenant, salt) hash the same bytes."""
    name, secret = (text.encode("utf-8", "surrogatepass") for text in (tenant, salt))
    return sha256(_DOMAIN + struct.pack("<Q", len(name)) + name + secret).digest()


def parent_hash(request: Request, num_blocks: int) -> bytes:
    if num_blocks:
        return request.block_hashes[num_blocks - 1]
    root = root_hash(request.tenant, request.cache_salt)
    return sha256(root + b"quantized").digest() if request.has_quantized_hashes else root


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    return (num_tokens - 1) // block_size


def extend_block_hashes(request: Request, num_full_blocks: int, block_size: int) -> None:
    hashes = request.block_hashes
    start, stop = len(hashes) * block_size, num_full_blocks * block_size
    if start >= stop:
        return
    data = tokens_between(request, start, stop)
    size = 4 * block_size
    parent = parent_hash(request, len(hashes))
    for offset in range(0, len(data), size):
        parent = sha256(parent + data[offset : offset + size]).digest()
        hashes.append(parent)


def tokens_between(request: Request, start: int, stop: int) -> bytes:
    """Return tokens ``[start, stop)`` as little-endian int32."""
    num_prompt_tokens = request.num_prompt_tokens
    head = b""
    if start < num_prompt_tokens:
        head = request.prompt_token_ids[start:stop].astype("<i4", copy=False).tobytes()
        if stop <= num_prompt_tokens:
            return head
    tokens = request.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
    return head + struct.pack(f"<{len(tokens)}i", *tokens)


SessionName = tuple[str, str]  # tenant, session_id


@dataclass(eq=False, slots=True)
class KVSession:
    """Cached conversation: digests of full blocks, and tokens of the partial last block."""

    tenant: str
    session_id: str
    parent: bytes  # digest before the tail
    keys: tuple[bytes, ...]
    tail_tokens: bytes  # int32 little endian; may be empty
    tail_key: bytes
    blocks: tuple[int, ...]  # in the pool, tail last; empty once given up, the first full ones while brought back
    expires_at: float
    pause: Pause | None = None  # while tools run, and until the next turn ends
    host_slots: tuple[int, ...] = ()  # kept while tools run

    @property
    def name(self) -> SessionName:
        return self.tenant, self.session_id

    @property
    def tail_block(self) -> int:
        return self.blocks[-1] if self.tail_tokens and len(self.blocks) > len(self.keys) else -1


class PrefixHit(NamedTuple):
    """Cached prefix of a request's tokens: full blocks in the pool, then in the host tier, then part of a block.

    The partial block is copied before the request writes to it.
    """

    block_ids: tuple[int, ...]
    num_tokens: int  # in all three
    host_keys: tuple[bytes, ...] = ()
    tail_block: int = -1  # in the pool, or -1
    tail_key: bytes = b""  # in the host tier
    session: KVSession | None = None  # owner of the tail

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids) + len(self.host_keys)


NO_HIT = PrefixHit((), 0)

FindSession = Callable[[str, str], KVSession | None]  # by tenant and session_id


class PrefixCache:
    """Index of prefixes that are cached (in pool, host tier or sessions) or being computed; empty if disabled."""

    def __init__(
        self, pool: BlockPool, host: BlockPool, find_session: FindSession, block_size: int, *, is_enabled: bool
    ) -> None:
        self.is_enabled = is_enabled
        self.weights: WeightVariant = "full"  # of the next step
        self._pool = pool
        self._host = host
        self._find_session = find_session
        self._block_size = block_size
        self.computing: dict[bytes, int] = {}  # digest → row
        self._announced: dict[int, list[bytes]] = {}

    def find(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix that leaves a token to compute; it is valid until the cache changes."""
        if not self.is_enabled:
            return NO_HIT
        limit = self._extend(request)
        hashes = request.block_hashes
        block_ids = self._pool.lookup_prefix(islice(hashes, limit))
        num_blocks = len(block_ids)
        if self._host.num_blocks:
            num_blocks += len(self._host.lookup_prefix(islice(hashes, num_blocks, limit)))
        hit = PrefixHit(block_ids, num_blocks * self._block_size, tuple(hashes[len(block_ids) : num_blocks]))
        session = self._find_session(request.tenant, request.session_id) if request.session_id else None
        return hit if session is None else self._with_session(hit, session, request)

    def estimate(self, request: Request) -> int:
        """Return about how many prompt tokens are cached, by binary search: a block rarely outlives one before it."""
        return self._num_found(request, self._extend(request)) * self._block_size if self.is_enabled else 0

    def slots_of(self, hit: PrefixHit) -> list[int] | None:
        """Return the host slots of a cached prefix; None if one was evicted."""
        keys = (*hit.host_keys, hit.tail_key) if hit.tail_key else hit.host_keys
        slots = [slot for key in keys if (slot := self._host.lookup(key)) is not None]
        return slots if len(slots) == len(keys) else None

    def find_computing(self, request: Request, hit: PrefixHit) -> tuple[int, int]:
        """Return (n, row): `row` is computing the n blocks that follow `hit`; or (0, -1). Takes time by the hit."""
        limit = max_hit_blocks(request.num_tokens, self._block_size)
        rows = map(self.computing.get, islice(request.block_hashes, hit.num_blocks, limit))
        row, run = next(groupby(rows), (None, ()))
        return (0, -1) if row is None else (len(list(run)), row)

    def announce(self, row: int, request: Request, hit: PrefixHit) -> None:
        num_full = request.num_tokens // self._block_size
        self._announced[row] = announced = request.block_hashes[hit.num_blocks : num_full]
        for block_hash in announced:
            self.computing.setdefault(block_hash, row)

    def drop_announced(self, row: int, block_hashes: Sequence[bytes] | None = None) -> None:
        for block_hash in self._announced.pop(row, ()) if block_hashes is None else block_hashes:
            if self.computing.get(block_hash) == row:
                del self.computing[block_hash]

    def _extend(self, request: Request) -> int:
        """Hash the request's full blocks, and return how many of them a hit may have.

        The hashes name the weights of the next step; if these are quantised, but full weights computed most of the
        request's cached blocks, then full weights.
        """
        limit = max_hit_blocks(request.num_tokens, self._block_size)
        extend_block_hashes(request, limit, self._block_size)
        is_quantized = (
            self.weights == "quantized"
            and not request.keeps_full_weights
            and (request.has_quantized_hashes or 2 * self._num_found(request, limit) <= limit)
        )
        if is_quantized != request.has_quantized_hashes:
            request.has_quantized_hashes, request.block_hashes = is_quantized, []
            extend_block_hashes(request, limit, self._block_size)
        return limit

    def _num_found(self, request: Request, limit: int) -> int:
        return bisect_right(request.block_hashes, False, hi=limit, key=self._is_missing)

    def _is_missing(self, key: bytes) -> bool:
        return self._pool.lookup(key) is None and self._host.lookup(key) is None

    def _with_session(self, hit: PrefixHit, session: KVSession, request: Request) -> PrefixHit:
        num_tokens = self._num_tail_tokens(hit, session, request)
        is_in_pool = session.tail_block >= 0
        if not num_tokens or not (is_in_pool or self._host.lookup(session.tail_key) is not None):
            return hit
        return hit._replace(
            num_tokens=hit.num_tokens + num_tokens,
            tail_block=session.tail_block,
            tail_key=b"" if is_in_pool else session.tail_key,
            session=session,
        )

    def _num_tail_tokens(self, hit: PrefixHit, session: KVSession, request: Request) -> int:
        if not session.tail_tokens or len(session.keys) != hit.num_blocks:
            return 0
        if session.parent != parent_hash(request, hit.num_blocks):
            return 0
        stop = min(hit.num_tokens + self._block_size, request.num_tokens - 1)
        return _num_common(session.tail_tokens, tokens_between(request, hit.num_tokens, stop))


def _num_common(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, "<i4", size) != np.frombuffer(other, "<i4", size)
    return int(differs.argmax()) if differs.any() else size
