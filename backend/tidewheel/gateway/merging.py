"""Streams of several prompts, read as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from tidewheel_client import Chunk
from tidewheel_client.errors import RequestError

AT_ONCE = 64  # streams that are read
ALIKE_S = 1.0  # for the others, when one has failed


async def merged(streams: Sequence[AsyncGenerator[list[Chunk]]]) -> AsyncGenerator[tuple[int, list[Chunk]]]:
    """Yield what comes first, with the number of its stream. Raise the first error, and end the others.

    At most `AT_ONCE` are read at one time, so that a long list leaves the server room for others.
    """
    turns = asyncio.Semaphore(AT_ONCE)
    arrived: asyncio.Queue[tuple[int, list[Chunk]] | RequestError | None] = asyncio.Queue(len(streams))

    async def read(number: int, stream: AsyncGenerator[list[Chunk]]) -> None:
        try:
            async with turns, contextlib.aclosing(stream) as responses:
                async for news in responses:
                    await arrived.put((number, news))
            await arrived.put(None)
        except RequestError as error:
            await arrived.put(error)

    readers = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_left = len(streams)
        while num_left:
            item = await arrived.get()
            if isinstance(item, RequestError):
                # Others may fail alike, and server 2.51 can die if a stream is cancelled as its error is sent.
                await asyncio.wait(readers, timeout=ALIKE_S)
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
