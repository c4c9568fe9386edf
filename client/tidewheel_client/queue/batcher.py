from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Collector of items while a write is under way, so that the next one writes all of them at once."""

    def __init__(self, write: Callable[[list[T]], Awaitable[Sequence[R]]], most: int = 256) -> None:
        self._write = write
        self._most = most
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._news = asyncio.Event()

    def add(self, item: T) -> asyncio.Future[R]:
        """Return the future of what the write returns for the item."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._news.set()
        return future

    async def run(self) -> None:
        """Write until cancelled. Raise what a write raises."""
        while True:
            await self._news.wait()
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            if not self._waiting:
                self._news.clear()
            answers = await self._write([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # its task may be cancelled
                    future.set_result(answer)
