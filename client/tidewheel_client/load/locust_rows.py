"""Rows of locust's statistics, by request type:

    GRPC, SSE, INFER, OPENAI   whole requests, from sending to last token; failures count here, under their tag
    TTFT                       times to the first token of successful streams
    TPOT                       mean times between tokens of streams with two or more

A row's name is model and QoS class; the names of TTFT and TPOT begin with the request type. Times are milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidewheel_client.errors import RequestError
from tidewheel_client.load.load_options import LoadRequest

logger = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()  # request types and labels of errors


class Timing:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = 0
        self.num_bytes = 0  # of text

    def arrived(self, num_tokens: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if num_tokens == 0:
            return
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        self._num_tokens += num_tokens

    @property
    def elapsed_ms(self) -> float:
        return 1e3 * (self._clock() - self._start)

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first is None else 1e3 * (self._first - self._start)

    @property
    def tpot_ms(self) -> float | None:
        if self._first is None or self._num_tokens < 2:
            return None
        return 1e3 * (self._last - self._first) / (self._num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Reporter:
    event: Any
    kind: str
    model: str

    def report(self, request: LoadRequest, timing: Timing, error: RequestError | None = None) -> None:
        """Add an ended request to locust's statistics; log the first error of each label."""
        name = f"{self.model} {request.qos}"
        label = None if error is None else error.label
        if label is not None and (self.kind, label) not in _logged:
            _logged.add((self.kind, label))
            logger.warning("first %s of %s users: %s", label, self.kind, error)
        self._fire(self.kind, name, timing.elapsed_ms, timing.num_bytes, label)
        if label is None and self.kind != "INFER":
            self._fire("TTFT", f"{self.kind} {name}", timing.ttft_ms)
            self._fire("TPOT", f"{self.kind} {name}", timing.tpot_ms)

    def _fire(self, row: str, name: str, value: float | None, num_bytes: int = 0, label: str | None = None) -> None:
        if value is not None:
            figures = {"response_time": value, "response_length": num_bytes, "exception": label}
            self.event.fire(request_type=row, name=name, context={}, **figures)
