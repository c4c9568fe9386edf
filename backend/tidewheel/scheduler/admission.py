from __future__ import annotations

from tidewheel.errors import Busy, InvalidRequest, PromptTooLarge, WaitingSetFull
from tidewheel.request import Priority, Request
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.queue import MAX_DISPLACED, WaitingSet
from tidewheel.stats import WaitingRoom

_FIRST_RETRY_MS = 250  # before any start
_MIN_RETRY_MS = 50
_MAX_RETRY_MS = 30_000
_SMOOTHING = 0.1  # weight of the newest interval


def check_lengths(num_prompt_tokens: int, max_tokens: int, min_tokens: int, limit: int) -> None:
    """Raise `InvalidRequest` unless prompt and output have tokens and fit into `limit`."""
    if num_prompt_tokens < 1:
        raise InvalidRequest("the prompt is empty: give at least one token")
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}: it must be at least 1")
    room = limit - num_prompt_tokens
    for name, value in (("max_tokens", max_tokens), ("min_tokens", min_tokens)):
        if value > room:
            raise InvalidRequest(
                f"{name} is {value}: the prompt has {num_prompt_tokens} tokens, so the context of {limit} "
                f"leaves room for {room}"
            )
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}")


class Admission:
    """Limits of the waiting set, and the retry hint."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._last_start: float | None = None
        self._start_interval: float | None = None  # smoothed

    def check_limits(self, request: Request, count: int) -> None:
        """Raise `InvalidRequest` if `count` such requests can never wait together or never run."""
        limit = self._config.max_model_len
        check_lengths(request.num_prompt_tokens, request.max_tokens, request.sampling.min_tokens, limit)
        self._check_count(request, count)
        self._check_pool(request)

    def find_room(
        self, request: Request, count: int, service_class: Priority, waiting: WaitingSet, now: float
    ) -> list[Request]:
        """Choose the waiting requests to evict for `count` new ones, at most `MAX_DISPLACED`.

        Raise `WaitingSetFull` if that is too little.
        """
        limits = self._config
        num_requests = waiting.num_new + count - limits.max_waiting_requests  # excess
        num_tokens = waiting.num_new_tokens + count * request.num_prompt_tokens - limits.max_waiting_tokens
        victims: list[Request] = []
        num_displaced = 0
        candidates = waiting.displaceable(request, count, service_class)
        while num_requests > 0 or num_tokens > 0:
            victim = next(candidates, None) if num_displaced < MAX_DISPLACED else None
            if victim is None:
                raise WaitingSetFull(
                    f"waiting set is full: {self._what_is_full(request, count, waiting)}",
                    retry_after_ms=self.retry_after_ms(waiting, now),
                )
            size = 1 + len(victim.followers)
            victims.append(victim)
            num_displaced += size
            num_requests -= size
            num_tokens -= size * victim.num_tokens
        return victims

    def eviction(self, victim: Request, service_class: Priority, waiting: WaitingSet, now: float) -> Busy:
        limits = self._config
        taker = "a request of a tenant with fewer waiting took the place of this one"
        if service_class < victim.service_class:
            taker = (
                f"a request of class {service_class.name} took the place of this one, of class "
                f"{victim.service_class.name}"
            )
        return Busy(
            f"waiting set is full: {waiting.num_new} of {limits.max_waiting_requests} requests, "
            f"{waiting.num_new_tokens} of {limits.max_waiting_tokens} tokens; {taker}",
            retry_after_ms=self.retry_after_ms(waiting, now),
        )

    def room(self, waiting: WaitingSet, now: float) -> WaitingRoom:
        """Return the figures that front ends check."""
        return WaitingRoom(
            num_requests=waiting.num_new,
            max_requests=self._config.max_waiting_requests,
            num_tokens=waiting.num_new_tokens,
            max_tokens=self._config.max_waiting_tokens,
            lowest_class=waiting.lowest_class,
            retry_after_ms=self.retry_after_ms(waiting, now),
        )

    def record_start(self, now: float) -> None:
        if self._last_start is not None:
            interval = max(now - self._last_start, 0.0)
            smoothed = interval if self._start_interval is None else self._start_interval
            self._start_interval = smoothed + _SMOOTHING * (interval - smoothed)
        self._last_start = now

    def retry_after_ms(self, waiting: WaitingSet, now: float) -> int:
        """Estimate the milliseconds until half of the waiting set has started.

        If nothing has started for longer than usual, that time counts as the interval between starts.
        """
        if self._start_interval is None or self._last_start is None:
            return _FIRST_RETRY_MS
        silence = now - max(self._last_start, waiting.oldest_arrival or 0.0)
        estimate = 1e3 * max(self._start_interval, silence) * waiting.num_new / 2
        return round(min(max(estimate, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _check_count(self, request: Request, count: int) -> None:
        limits, num_prompt_tokens = self._config, request.num_prompt_tokens
        if count > limits.max_waiting_requests:
            raise InvalidRequest(f"n is {count}: at most {limits.max_waiting_requests} requests may wait")
        if count * num_prompt_tokens > limits.max_waiting_tokens:
            times = "" if count == 1 else f", {count} times"
            raise PromptTooLarge(
                f"prompt of {num_prompt_tokens} tokens{times}: at most {limits.max_waiting_tokens} tokens may wait"
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

    def _what_is_full(self, request: Request, count: int, waiting: WaitingSet) -> str:
        limits = self._config
        if waiting.num_new + count > limits.max_waiting_requests:
            several = "" if count == 1 else f", and this one asks for {count} sequences"
            return f"{waiting.num_new} of {limits.max_waiting_requests} requests{several}"
        times = "" if count == 1 else f" {count} times"
        return (
            f"{waiting.num_new_tokens} of {limits.max_waiting_tokens} tokens, "
            f"and this prompt has {request.num_prompt_tokens}{times}"
        )
