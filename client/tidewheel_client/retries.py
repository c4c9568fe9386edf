"""When a request is sent again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidewheel_client.errors import RequestError

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Retries:
    """Up to `limit` times after a retryable error, if nothing of the answer has come.

    Wait as long as the server says, or 0.1 s and then twice as long each time, and up to a quarter more by chance, so
    that clients that were refused together do not come back together.
    """

    limit: int = 0

    def wait_s(self, error: RequestError, num_retries: int, left_s: float | None) -> float | None:
        """Return how long to wait before the next try, of `left_s` for the request; None: no more tries."""
        if not error.retryable or num_retries >= self.limit:
            return None
        backoff = min(_FIRST_WAIT_S * 2**num_retries, _LONGEST_WAIT_S)
        wait = backoff if error.retry_after_ms is None else max(error.retry_after_ms / 1e3, 0.0)
        wait *= 1 + random.random() / 4  # noqa: S311
        return None if left_s is not None and wait >= left_s else wait
