from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tidewheel_client.async_client import AsyncClient
from tidewheel_client.errors import RequestError
from tidewheel_client.facade import AsyncEvent

_FIRST_LOOK_S = 0.1
_LONGEST_LOOK_S = 2.0


class ServerGate:
    """Gate of a worker, shut while the server is away or busy. Each opening calls `on_open`."""

    def __init__(self, client: AsyncClient, note: Callable[[str], None], on_open: Callable[[], None]) -> None:
        self._client = client
        self._note = note
        self._on_open = on_open
        self._opened = asyncio.Event()
        self._shut = asyncio.Event()
        self._ending = AsyncEvent()
        self._paused_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and time.monotonic() >= self._paused_until

    def shut(self, reason: str) -> None:
        if self._opened.is_set() and not self._ending.is_set():
            self._note(f"the server at {self._client.url} is away, its jobs wait for it: {reason}")
            self._opened.clear()
            self._shut.set()

    def pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    async def wait(self, seconds: float = 0.0) -> bool:
        """Wait `seconds`, then until the gate opens. Return False if the worker ends."""
        if seconds > 0:
            await self._ending.wait_for(seconds)
        await self._opened.wait()
        return not self._ending.is_set()

    def end(self) -> None:
        """Open the gate for good, so that waiting tasks give back their jobs."""
        self._ending.set()
        self._opened.set()

    async def run(self) -> None:
        while True:
            look_s = _FIRST_LOOK_S
            while not await self._is_ready():
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
            self._note(f"model {self._client.model!r} at {self._client.url} is ready")
            self._opened.set()
            self._on_open()
            await self._shut.wait()
            self._shut.clear()

    async def _is_ready(self) -> bool:
        try:
            return await self._client.is_ready()
        except RequestError:
            return False
