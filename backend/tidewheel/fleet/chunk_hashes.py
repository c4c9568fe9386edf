"""Chained hashes of a prompt's chunks: two prompts share the first n hashes if they share the first n chunks."""

from __future__ import annotations

from hashlib import blake2b

MAX_CHUNKS = 512  # of one prompt; what follows them is not looked for


def chunk_hashes(data: bytes | memoryview, chunk_bytes: int, tenant: str = "", salt: str = "") -> tuple[int, ...]:
    """Return a hash for each full chunk. Tenants and salts, whose caches are apart, share none."""
    view = memoryview(data)
    name = tenant.encode("utf-8", "surrogatepass")
    parent = blake2b(
        b"%d " % len(name) + name + salt.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tw chunk"
    ).digest()
    hashes = []
    for start in range(0, min(len(view) // chunk_bytes, MAX_CHUNKS) * chunk_bytes, chunk_bytes):
        digest = blake2b(parent, digest_size=8)
        digest.update(view[start : start + chunk_bytes])
        parent = digest.digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)
