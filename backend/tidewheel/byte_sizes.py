"""Sizes of memory, and how they are shown."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def shown_bytes(num_bytes: int) -> str:
    """Return a size of at least 1 GiB in GiB, a smaller one in MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f}".removesuffix(".0") + " MiB"
