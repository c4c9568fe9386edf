from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidewheel.bench.values import Offered, Outcome


class Transport(Protocol):
    """Sender of any number of concurrent requests, on one event loop."""

    async def open(self) -> None:
        """Connect and inspect the model; raise `BenchError` if unfit."""

    async def send(self, offered: Offered, input_ids: Sequence[int], outcome: Outcome) -> None:
        """Send a request and fill `outcome` until its end; raise `RequestFailed`."""

    async def close(self) -> None: ...


def words(input_ids: Sequence[int]) -> str:
    """Return a word per id, some tokens each, for targets without ids."""
    return " ".join(f"t{token_id}" for token_id in input_ids)
