"""The way of one request from server to server: what each is sent, and what of its answer is news."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from tidewheel.gateway.order import Order
from tidewheel.gateway.upstream import Upstream

R = TypeVar("R")  # a request as it is sent
N = TypeVar("N")  # news of its answer


class Course(Generic[R, N]):
    """One that begins anew at each server, as long as none has brought news."""

    def __init__(self, order: Order[R], request: R, send: Callable[[Upstream, R], AsyncGenerator[N]]) -> None:
        self.order = order
        self._request = request
        self._send = send
        self.has_begun = False  # news was passed on

    @property
    def may_move(self) -> bool:
        """Return whether another server may be asked."""
        return not self.has_begun

    def move(self) -> None:
        """Prepare for the next server. Raise `DeadlineExceeded` if no time is left."""
        self._request = self.order.encode_again()

    def send(self, upstream: Upstream) -> AsyncGenerator[N]:
        return self._send(upstream, self._request)
