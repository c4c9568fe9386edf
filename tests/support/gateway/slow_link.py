"""A forwarder of TCP that delivers every byte later, in both directions: a network for tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            loop.call_later(delay_s, writer.write, data)
    loop.call_later(delay_s, writer.close)


@contextlib.contextmanager
def slow_link(port: int, delay_s: float) -> Iterator[int]:
    """Forward a free port of the loopback, which is yielded, to another; each way takes `delay_s`."""
    loop = asyncio.new_event_loop()
    tasks: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        writers.update((writer, far_writer))
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(_carry(*ends, delay_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def end() -> None:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets now

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
