"""Finds out which clients are gone, by asking: nobody tells a Python backend. Sees to deadlines on its way.

Each question is a round trip to the server of about 100 µs, so one thread asks, request after request, and spends a
bounded share of its time on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from tidewheel.frontend.live import LiveRequest

logger = logging.getLogger(__name__)

GRACE_NS = 250_000_000  # the engine ends what is there by itself, at the end of a step
_MAX_SHARE = 0.2  # of the time: at 100 µs a question and 20 ms between rounds, 40 requests a round


class CancellationPoller:
    """Calls `cancel` for live requests whose sink says so, and `expire` for those whose deadline has passed without
    an answer, each at most once per sweep over all of them."""

    def __init__(
        self,
        live: Callable[[], list[LiveRequest]],
        cancel: Callable[[LiveRequest], None],
        expire: Callable[[LiveRequest], None],
        *,
        interval_s: float,
    ) -> None:
        self._live = live
        self._cancel = cancel
        self._expire = expire
        self._interval_s = interval_s
        self._sweep: Iterator[LiveRequest] = iter(())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)

    def poll(self, budget_s: float) -> None:
        """One round: goes on with the sweep where the last round stopped, and begins a new one at its end."""
        deadline = time.monotonic() + budget_s
        for request in self._sweep:
            self._ask(request)
            if time.monotonic() >= deadline:
                return
        self._sweep = iter(self._live())

    def _ask(self, request: LiveRequest) -> None:
        try:
            is_cancelled = request.sink.is_cancelled()
        except Exception:
            logger.exception("a sink could not say whether its client is still there")
            is_cancelled = True
        if is_cancelled:
            self._cancel(request)
        elif request.is_overdue(time.monotonic_ns(), GRACE_NS):
            self._expire(request)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.poll(self._interval_s * _MAX_SHARE)
            except Exception:
                logger.exception("a round of questions for cancelled requests failed")
