"""What the driver asks of a way to send requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidewheel.bench.values import Offered, Outcome


class Transport(Protocol):
    """Lives on one event loop; any number of requests at a time."""

    async def open(self) -> None:
        """Connects and looks at the model. Raises `BenchError` if it cannot be measured as it is."""

    async def send(self, offered: Offered, input_ids: Sequence[int], outcome: Outcome) -> None:
        """One request, to its end; what arrives is noted in `outcome`. Raises `RequestFailed`."""

    async def close(self) -> None: ...


def words(input_ids: Sequence[int]) -> str:
    """A text of as many words as there are ids, for targets that take no ids; about a token each, or a few."""
    return " ".join(f"t{token_id}" for token_id in input_ids)
