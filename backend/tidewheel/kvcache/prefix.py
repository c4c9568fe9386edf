"""Names for the content of full blocks: a chain of SHA-256 digests.

    root = H(domain, tenant, salt)        h_0 = H(root, tokens of block 0)        h_i = H(h_{i-1}, tokens of block i)

A digest stands for every token up to the end of its block, for the tenant and for the salt, so equal digests mean
equal prefixes of one tenant under one salt, and a hit needs no second look at the tokens: SHA-256 is collision-safe,
which a plain `hash()` is not (CVE-2025-25183). Tenants never share a block, nor do requests with different salts.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import sha256

from tidewheel.batch import Int32Array
from tidewheel.request import Request

_DOMAIN = b"tidewheel kv block v2\0"


def root_hash(tenant: str, salt: str) -> bytes:
    """The length of the tenant's name goes first, so that no other pair of names reads the same."""
    name, secret = (text.encode("utf-8", "surrogatepass") for text in (tenant, salt))
    return sha256(_DOMAIN + struct.pack("<Q", len(name)) + name + secret).digest()


def max_hit_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that a request with `num_tokens` tokens may take from the cache: one token must be left to compute."""
    return (num_tokens - 1) // block_size


def extend_block_hashes(request: Request, num_full_blocks: int, block_size: int) -> None:
    """Brings `request.block_hashes` to at least `num_full_blocks` digests. Its tokens must reach that far."""
    hashes = request.block_hashes
    start, stop = len(hashes) * block_size, num_full_blocks * block_size
    if start >= stop:
        return
    data = tokens_between(request, start, stop)
    size = 4 * block_size
    parent = hashes[-1] if hashes else root_hash(request.tenant, request.cache_salt)
    for offset in range(0, len(data), size):
        parent = sha256(parent + data[offset : offset + size]).digest()
        hashes.append(parent)


def tail_hash(parent: bytes, tokens: bytes) -> bytes:
    """Names the content of a block that is not full. No full block has this name: it has more tokens."""
    return sha256(parent + tokens).digest()


def tokens_between(request: Request, start: int, stop: int) -> bytes:
    """Tokens ``[start, stop)`` of the request as int32, little endian."""
    return _token_bytes(request.prompt_token_ids, request.output_token_ids, start, stop)


def _token_bytes(prompt: Int32Array, output: list[int], start: int, stop: int) -> bytes:
    """Tokens ``[start, stop)`` of prompt and output as int32, little endian."""
    num_prompt_tokens = len(prompt)
    if stop <= num_prompt_tokens:
        return prompt[start:stop].astype("<i4", copy=False).tobytes()
    if start < num_prompt_tokens:
        head = prompt[start:].astype("<i4", copy=False).tobytes()
        return head + _token_bytes(prompt, output, num_prompt_tokens, stop)
    tokens = output[start - num_prompt_tokens : stop - num_prompt_tokens]
    return _int32_struct(len(tokens)).pack(*tokens)


@lru_cache(maxsize=64)
def _int32_struct(count: int) -> struct.Struct:
    """Packs a short list several times faster than numpy converts it."""
    return struct.Struct(f"<{count}i")
