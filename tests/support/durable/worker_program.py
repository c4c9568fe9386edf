"""A worker of a queue whose model echoes: `python worker_program.py WHERE NAME DELAY_S LEASE_S`, until SIGTERM.

Each request that begins is a line `id` of standard output.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from tidewheel_client import AsyncClient
from tidewheel_client.answers import Chunk
from tidewheel_client.transport import Ask, MockTransport, Responses
from tidewheel_queue import Worker, WorkerOptions


class EchoTransport(MockTransport):
    """Answer with the prompt in capitals, after a while."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(lambda ask: str(ask.prompt["text_input"]).upper())
        self._delay_s = delay_s

    def open(self, ask: Ask, timeout_s: float | None) -> Responses:
        os.write(1, f"{ask.request_id}\n".encode())  # at once, newline included, for a process that is killed
        return _Slow(super().open(ask, timeout_s), self._delay_s)


class _Slow:
    def __init__(self, responses: Any, delay_s: float) -> None:
        self._responses = responses
        self._delay_s = delay_s

    async def receive(self) -> list[Chunk] | None:
        await asyncio.sleep(self._delay_s)
        found: list[Chunk] | None = await self._responses.receive()
        return found

    def cancel(self) -> None:
        self._responses.cancel()

    async def close(self) -> None:
        pass


async def work(where: str, name: str, delay_s: float, lease_s: float) -> None:
    options = WorkerOptions(concurrency=4, lease_s=lease_s, max_attempts=1000)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    worker = Worker(AsyncClient(transport=EchoTransport(delay_s)), where, name=name, options=options, note=note)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
