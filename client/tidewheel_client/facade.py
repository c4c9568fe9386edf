"""Synchronous facades of coroutine methods that block and never suspend, and parts that a facade's core replaces.

Any thread can run such a coroutine to its end without an event loop.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

A = TypeVar("A")
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_AHEAD = 4  # times the concurrency: answers that may wait for an earlier one


class Facade(Generic[C]):
    def __init__(self, core: C) -> None:
        self._core = core

    def __enter__(self) -> Self:
        run(cast(Any, self._core).__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        run(cast(Any, self._core).__aexit__(*error))


def run(call: Awaitable[R]) -> R:
    """Run a coroutine that never suspends."""
    try:
        next(iter(call.__await__()))
    except StopIteration as end:
        return cast(R, end.value)
    raise RuntimeError("the core of a facade must not suspend")


async def settled(answer: Any) -> Any:
    """Return `answer`, awaited if it comes from a library's asynchronous variant."""
    return await answer if inspect.isawaitable(answer) else answer


def iterate(items: AsyncIterator[R]) -> Iterator[R]:
    try:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield run(anext(items))
    finally:
        if isinstance(items, AsyncGenerator):
            run(items.aclose())


def signed_as(
    method: Callable[Concatenate[C, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method with another's parameters."""

    def sign(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        returned = inspect.signature(function).return_annotation
        cast(Any, function).__signature__ = inspect.signature(method).replace(return_annotation=returned)
        return function

    return sign


def facing(
    method: Callable[Concatenate[C, P], A], convert: Callable[[A], R]
) -> Callable[Concatenate[Facade[C], P], R]:
    """Return a facade's method, which converts what the core's `method` returns."""

    @functools.wraps(method)
    def call(self: Facade[C], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return convert(method(self._core, *args, **kwargs))

    return call


def blocking(method: Callable[Concatenate[C, P], Awaitable[R]]) -> Callable[Concatenate[Facade[C], P], R]:
    return facing(method, run)


class AsyncEvent(asyncio.Event):
    async def wait_for(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()
        return self.is_set()


class BlockingEvent(threading.Event):
    async def wait_for(self, seconds: float) -> bool:
        return self.wait(seconds)


WakeEvent = AsyncEvent | BlockingEvent


async def in_threads(
    ask: Callable[[T], Awaitable[R]], items: Iterable[T], *, concurrency: int, progress: bool
) -> AsyncIterator[R]:
    """Yield blocking calls' results in order. An error or close drops calls not begun."""
    with ThreadPoolExecutor(concurrency, thread_name_prefix="tidewheel-map") as pool:
        started = (pool.submit(lambda item: run(ask(item)), item) for item in items)
        try:
            for future in _in_order(started, deque(), items, concurrency, progress):
                yield future.result()
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

    try:
        started = (asyncio.create_task(ask_in_turn(item)) for item in items)
        for task in _in_order(started, waiting, items, concurrency, progress):
            yield await task
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _in_order(
    started: Iterator[T], waiting: deque[T], items: Iterable[object], concurrency: int, progress: bool
) -> Iterator[T]:
    """Yield started calls, of which `waiting` holds the next."""
    from tqdm import tqdm

    num_items = len(items) if isinstance(items, Sized) else None
    with tqdm(total=num_items, unit=" requests", disable=not progress) as bar:
        waiting.extend(itertools.islice(started, _AHEAD * concurrency))
        while waiting:
            yield waiting.popleft()
            bar.update()
            waiting.extend(itertools.islice(started, 1))
