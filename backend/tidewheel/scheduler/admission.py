"""Which requests may wait. Nothing waits without a bound, and what can never run is refused at once."""

from __future__ import annotations

from tidewheel.errors import Busy, InvalidRequest, PromptTooLarge
from tidewheel.request import Request
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.queue import WaitingSet

_FIRST_RETRY_MS = 250  # while no pace is known
_MIN_RETRY_MS = 50
_MAX_RETRY_MS = 30_000
_SMOOTHING = 0.1  # weight of the newest interval


class Admission:
    """Checks that change nothing, and the pace at which waiting requests start, for the retry hint."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._block_size = block_size
        self.headroom = int(config.watermark * num_blocks)  # blocks that an admission leaves free
        self._last_start: float | None = None
        self._start_interval: float | None = None  # seconds between starts, smoothed

    def check(self, request: Request, waiting: WaitingSet, now: float) -> None:
        """Raises `InvalidRequest` if the request can never run, `Busy` if it cannot wait now."""
        self._check_lengths(request)
        self._check_pool(request)
        self._check_room(request, waiting, now)

    def record_start(self, now: float) -> None:
        """A waiting request was scheduled for the first time."""
        if self._last_start is not None:
            interval = max(now - self._last_start, 0.0)
            smoothed = interval if self._start_interval is None else self._start_interval
            self._start_interval = smoothed + _SMOOTHING * (interval - smoothed)
        self._last_start = now

    def retry_after_ms(self, waiting: WaitingSet, now: float) -> int:
        """Time until about half of the waiting set has started: later than the first free place, so that refused
        clients do not all come back for that one. A head that waits longer than usual counts as a slower pace."""
        if self._start_interval is None or self._last_start is None:
            return _FIRST_RETRY_MS
        silence = now - max(self._last_start, waiting.head().arrival_time)
        estimate = 1e3 * max(self._start_interval, silence) * waiting.num_new / 2
        return round(min(max(estimate, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _check_lengths(self, request: Request) -> None:
        num_prompt_tokens, limit = request.num_prompt_tokens, self._config.max_model_len
        if num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty: give at least one token")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.max_tokens}: it must be at least 1")
        min_tokens = request.sampling.min_tokens
        if min_tokens > request.max_tokens:
            raise InvalidRequest(f"min_tokens is {min_tokens}, more than max_tokens {request.max_tokens}")
        if request.max_num_tokens > limit:
            raise InvalidRequest(
                f"prompt of {num_prompt_tokens} tokens and max_tokens {request.max_tokens} make "
                f"{request.max_num_tokens}: the context has {limit} tokens"
            )
        if num_prompt_tokens > self._config.max_waiting_tokens:
            raise PromptTooLarge(
                f"prompt of {num_prompt_tokens} tokens: at most {self._config.max_waiting_tokens} tokens may wait"
            )

    def _check_pool(self, request: Request) -> None:
        # The last token is never fed back, so it needs no slot.
        num_blocks = -(-(request.max_num_tokens - 1) // self._block_size)
        if num_blocks > self._num_blocks:
            raise InvalidRequest(
                f"prompt of {request.num_prompt_tokens} tokens and max_tokens {request.max_tokens} need {num_blocks} "
                f"blocks of {self._block_size} tokens: the KV cache has {self._num_blocks}, "
                f"enough for {self._num_blocks * self._block_size + 1} tokens in all"
            )

    def _check_room(self, request: Request, waiting: WaitingSet, now: float) -> None:
        limits = self._config
        if waiting.num_new >= limits.max_waiting_requests:
            reason = f"{waiting.num_new} of {limits.max_waiting_requests} requests"
        elif waiting.num_new_tokens + request.num_prompt_tokens > limits.max_waiting_tokens:
            reason = (
                f"{waiting.num_new_tokens} of {limits.max_waiting_tokens} tokens, "
                f"and this prompt has {request.num_prompt_tokens}"
            )
        else:
            return
        raise Busy(f"waiting set is full: {reason}", retry_after_ms=self.retry_after_ms(waiting, now))
