"""Slot of a replica that Ray Serve keeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tidewheel.gateway.upstreams import NoServer
from tidewheel_client.errors import ServerUnavailable

_LOOK_S = 0.1


class Reservation:
    """Owner of the slot, from the asking on until `release`. It is of the given replica, or of that of a ticket."""

    def __init__(self, handle: Any, asked: int | str) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._asking = asyncio.create_task(self._stack.enter_async_context(handle.choose_replica(asked)))

    @property
    def has_failed(self) -> bool:
        """Return whether there is no slot, and will be none."""
        asking = self._asking
        return asking.done() and (asking.cancelled() or asking.exception() is not None)

    async def replica(self, patience_s: float) -> str | None:
        """Return the id of its replica. None: there is none within the patience. Raise `NoServer`."""
        await asyncio.wait({self._asking}, timeout=patience_s)
        if not self._asking.done():
            return None
        try:
            return str(self._asking.result().replica_id)
        except _ray_errors() as error:
            raise NoServer(f"Ray Serve has no replica: {error}") from None

    async def wait(self, is_there: Callable[[], bool]) -> None:
        """Return when the slot is kept. Raise `ServerUnavailable` if its replica goes first."""
        while not self._asking.done():
            if not is_there():
                raise ServerUnavailable("its replica went as it was asked")
            await asyncio.wait({self._asking}, timeout=_LOOK_S)
        try:
            self._asking.result()
        except _ray_errors() as error:
            raise ServerUnavailable(f"its replica was lost: {error}") from None

    async def release(self) -> None:
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        await self._stack.aclose()


def _ray_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException
