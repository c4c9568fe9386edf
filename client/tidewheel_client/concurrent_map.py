from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from tidewheel_client.facade import run

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 4  # times the concurrency: answers that may wait for an earlier one


async def in_threads(
    ask: Callable[[T], Awaitable[R]], items: Iterable[T], *, concurrency: int, progress: bool
) -> AsyncIterator[R]:
    """Yield blocking calls' results in order. An error or close drops calls not begun."""
    waiting: deque[Future[R]] = deque()
    with _bar(items, progress) as bar, ThreadPoolExecutor(concurrency, thread_name_prefix="tidewheel-map") as pool:
        try:
            started = (pool.submit(lambda item: run(ask(item)), item) for item in items)
            waiting.extend(itertools.islice(started, _AHEAD * concurrency))
            while waiting:
                yield waiting.popleft().result()
                bar.update()
                waiting.extend(itertools.islice(started, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


async def in_tasks(
    ask: Callable[[T], Awaitable[R]], items: Iterable[T], *, concurrency: int, progress: bool
) -> AsyncIterator[R]:
    """Yield results of coroutines, in order. An error or close cancels the others."""
    free = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[R]] = deque()

    async def ask_in_turn(item: T) -> R:
        async with free:
            return await ask(item)

    with _bar(items, progress) as bar:
        try:
            started = (asyncio.create_task(ask_in_turn(item)) for item in items)
            waiting.extend(itertools.islice(started, _AHEAD * concurrency))
            while waiting:
                yield await waiting.popleft()
                bar.update()
                waiting.extend(itertools.islice(started, 1))
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _bar(items: Iterable[object], progress: bool) -> tqdm[object]:
    from tqdm import tqdm

    return tqdm(total=len(items) if isinstance(items, Sized) else None, unit=" requests", disable=not progress)
