"""Digests of full blocks, chained by SHA-256.

    root = H(domain, tenant, salt)        h_0 = H(root, tokens of block 0)        h_i = H(h_{i-1}, tokens of block i)

A digest stands for tenant, salt and every token up to the end of its block. Hits need no comparison of tokens,
because SHA-256 is collision-safe, unlike `hash()` (CVE-2025-25183). Different tenants or salts never share a block.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import sha256

from tidewheel.request import Request

_DOMAIN = b"tidewheel kv block v2\0"


def root_hash(tenant: str, salt: str) -> bytes:
    """Return the digest before the first block. The length separates tenant and salt."""
    name, secret = (text.encode("utf-8", "surrogatepass") for text in (tenant, salt))
    return sha256(_DOMAIN + struct.pack("<Q", len(name)) + name + secret).digest()


def parent_hash(request: Request, num_blocks: int) -> bytes:
    """Return the digest before block `num_blocks`."""
    return request.block_hashes[num_blocks - 1] if num_blocks else root_hash(request.tenant, request.cache_salt)


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    """Return the most cached blocks for a request, which must compute one token."""
    return (num_tokens - 1) // block_size


def extend_block_hashes(request: Request, num_full_blocks: int, block_size: int) -> None:
    """Extend `request.block_hashes` to `num_full_blocks`. The request must have the tokens."""
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


def tail_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a partial block, which no full block has."""
    return sha256(parent + tokens).digest()


def tokens_between(request: Request, start: int, stop: int) -> bytes:
    """Return tokens ``[start, stop)`` as little-endian int32."""
    num_prompt_tokens = request.num_prompt_tokens
    head = b""
    if start < num_prompt_tokens:
        head = request.prompt_token_ids[start:stop].astype("<i4", copy=False).tobytes()
        if stop <= num_prompt_tokens:
            return head
    tokens = request.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
    return head + _int32_struct(len(tokens)).pack(*tokens)


@lru_cache(maxsize=64)
def _int32_struct(count: int) -> struct.Struct:
    """Return a packer for short lists, several times faster than numpy."""
    return struct.Struct(f"<{count}i")
