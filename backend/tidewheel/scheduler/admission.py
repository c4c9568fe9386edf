import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from tidewheel.errors import Busy, DeadlineExceeded, InvalidRequest, PromptTooLarge, TidewheelError
from tidewheel.lora import Lora
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.breaker import CircuitBreaker
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.estimates import ServiceEstimate
from tidewheel.scheduler.queue import MAX_DISPLACED
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.tenancy import TenantTable
from tidewheel.stats import LoraFigures, RequestFigures, TenantFigures, WaitingRoom
from tidewheel.tenants import EVERYBODY, limits_of

MAX_LABELS = 64  # of tenants
MAX_LORA_LABELS = 32
LABEL_CHARS = 64
OTHERS = "other"
_FIRST_RETRY_MS = 250
_MIN_RETRY_MS = 50
_MAX_RETRY_MS = 30_000
_SMOOTHING = 0.1


@lru_cache(4096)
def label_of(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:LABEL_CHARS]


def check_lengths(num_prompt_tokens: int, max_tokens: int, min_tokens: int, limit: int) -> None:
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


class AdmissionControl:
    def __init__(self, state: SchedulerState, estimate: ServiceEstimate) -> None:
        self._state = state
        self._estimate = estimate
        state.observe_end = self._observe_end
        self._last_start: float | None = None
        self._start_interval: float | None = None
        self._tenants = TenantTable(state.config.tenants)
        self._lora_limits = TenantTable(state.config.lora_limits, by_lora=True)
        self._label_tenants()
        self._make_breaker()

    def reconfigure(self, before: SchedulerConfig) -> None:
        config = self._state.config
        self._tenants.reconfigure(config.tenants)
        self._lora_limits.reconfigure(config.lora_limits)
        self._label_tenants()
        limits = config.breaker_error_rate, config.breaker_queue_time_s
        if limits != (before.breaker_error_rate, before.breaker_queue_time_s):
            self._make_breaker()

    def _label_tenants(self) -> None:
        stats, named = self._state.stats, [name for name in self._state.config.tenants if name != EVERYBODY]
        self._labels = {name: label_of(name) for name in named[:MAX_LABELS]}
        labels = (*self._labels.values(), OTHERS)
        stats.tenants = {label: stats.tenants.get(label) or TenantFigures() for label in labels}

    def _figures(self, tenant: str) -> TenantFigures:
        return self._state.stats.tenants[self._labels.get(tenant, OTHERS)]

    def _lora_figures(self, lora: Lora) -> LoraFigures:
        """Return the figures under an adapter's label; the first adapters that are used have labels of their own."""
        label, figures = label_of(lora.name), self._state.stats.loras
        if label not in figures and len(figures) >= MAX_LORA_LABELS:
            label = OTHERS
        return figures.setdefault(label, LoraFigures())

    def count_loras(self) -> None:
        """Count running and waiting requests by adapter."""
        for figures in self._state.stats.loras.values():
            figures.num_running = figures.num_waiting = 0
        for request in self._state.requests.values() if self._state.stats.loras else ():
            if request.lora is not None:
                figures = self._lora_figures(request.lora)
                figures.num_running += request.row >= 0
                figures.num_waiting += request.row < 0

    def _make_breaker(self) -> None:
        config = self._state.config
        self.breaker = CircuitBreaker(config.breaker_error_rate, config.breaker_queue_time_s)
        self.breaker.num_shed = self._state.stats.num_shed_by_class

    def admit(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Queue the requests; return evicted ones. Raise `InvalidRequest`, `Busy` or `DeadlineExceeded`."""
        figures, count, lora = self._figures(requests[0].tenant), len(requests), requests[0].lora
        figures.num_requests += count
        if lora is not None:
            self._lora_figures(lora).num_requests += count
        for request in requests:
            request.priority = limits_of(self._state.config.tenants, request.tenant).granted(request.priority)
        try:
            return self._admit(requests, now)
        except TidewheelError as error:
            figures.num_rejected += count
            for request in requests:
                self._count_objective(request)
            self._state.stats.num_hopeless += isinstance(error, DeadlineExceeded)
            raise

    def _admit(self, requests: Sequence[Request], now: float) -> list[Request]:
        state, request, count = self._state, requests[0], len(requests)
        self._check_size(request, count)
        if not state.columns.num_paced:
            self._estimate.step_tokens = state.config.max_num_batched_tokens  # the last step may have been cut
        over_quota = state.is_over_quota(request)
        service_class = request.priority.dropped() if over_quota else request.priority
        miss = self._predict_miss(request, service_class, now)
        refuses = request.objective is not None and request.objective.refuses
        is_demoted = bool(miss) and not refuses
        service_class = service_class.dropped() if is_demoted else service_class
        victims = self.choose_evictions(request, count, service_class, now)
        predicted = float(request.max_tokens)
        if not request.bucket:  # else the number of steps is known
            predicted = state.predictor.predict(request.tenant, request.num_prompt_tokens, request.max_tokens)
        if miss and refuses:
            raise DeadlineExceeded(miss)
        self._check_load(requests, request.num_prompt_tokens + math.ceil(predicted), service_class, now)
        evicted = [member for victim in victims for member in self._evict(victim, service_class, now)]
        for newcomer in requests:
            newcomer.predicted_output_tokens = predicted
            newcomer.service_class = service_class
            newcomer.was_over_quota = over_quota
            newcomer.is_demoted = is_demoted
            newcomer.latest_start = math.inf if is_demoted else request.latest_start
            state.stats.num_downgraded_objective += is_demoted and service_class is not newcomer.priority
            state.stats.num_downgraded_quota += over_quota and service_class is not newcomer.priority
        state.wait(list(requests))
        return evicted

    def observe_refused(self, refused: Mapping[str, int]) -> None:
        for tenant, count in refused.items():
            figures = self._figures(tenant)
            figures.num_requests += count
            figures.num_rejected += count

    def observe_starts(self, requests: list[Request], now: float) -> None:
        stats = self._state.stats
        for request in requests:
            seconds = max(now - request.arrival_time, 0.0)
            index = request.priority - 1
            stats.started_by_class[index] += 1
            stats.max_wait_by_class[index] = max(stats.max_wait_by_class[index], seconds)
            figures = self._figures(request.tenant)
            figures.num_started += 1
            figures.queue_seconds += seconds
            if self._last_start is not None:
                interval = max(now - self._last_start, 0.0)
                smoothed = interval if self._start_interval is None else self._start_interval
                self._start_interval = smoothed + _SMOOTHING * (interval - smoothed)
            self._last_start = now
            self.breaker.observe_queue_time(seconds, request.priority, now)

    def _observe_end(self, request: Request, now: float) -> None:
        """Learn from an ended request. Only STOP and LENGTH train the length predictor."""
        self._tenants.settle(request, now)
        self._lora_limits.settle(request, now)
        if request.finish_reason is not FinishReason.CANCELLED:
            self._count_objective(request)
        tenant, reason = self._figures(request.tenant), request.finish_reason
        is_refusal = isinstance(request.error, Busy | DeadlineExceeded)
        if request.first_scheduled_time is None:
            tenant.num_rejected += is_refusal
        else:
            sums: list[RequestFigures] = [tenant]
            if request.lora is not None:
                sums.append(self._lora_figures(request.lora))
            for figures in sums:
                figures.num_prompt_tokens += request.num_prompt_tokens
                figures.num_output_tokens += request.num_output_tokens
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            if not request.bucket:
                self._state.predictor.observe(
                    request.tenant,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    request.predicted_output_tokens,
                )
            self.breaker.observe_end(False, now)
        elif reason is FinishReason.ERROR and not is_refusal:
            self.breaker.observe_end(True, now)

    def _count_objective(self, request: Request) -> None:
        if request.objective is None:
            return
        figures, stats, is_met = self._figures(request.tenant), self._state.stats, request.meets_objective
        figures.num_objectives += 1
        figures.num_objectives_met += is_met
        stats.objectives_by_class[request.priority - 1] += 1
        stats.objectives_met_by_class[request.priority - 1] += is_met

    def _predict_miss(self, request: Request, service_class: Priority, now: float) -> str:
        """Return why the request would miss its objective, with prediction and limit; empty: it would not.

        Set the latest start that meets its first token's.
        """
        objective, state = request.objective, self._state
        if objective is None:
            return ""
        token_s = state.step_time.seconds(0) * state.step_time.steps_per_token
        if token_s > objective.tpot_s and state.step_time.is_fresh(now):
            return f"a token is expected to take {1e3 * token_s:.1f} ms, and tpot_ms is {1e3 * objective.tpot_s:g}"
        if objective.ttft_s == math.inf:
            return ""
        request.latest_start = self._latest_start(request, now)
        prefill_s = request.arrival_time + objective.ttft_s - request.latest_start
        expected = self._queue_seconds(service_class, now) + prefill_s
        if now + expected <= request.arrival_time + objective.ttft_s:
            return ""
        return self._late_text(request, expected + now - request.arrival_time)

    def _latest_start(self, request: Request, now: float) -> float:
        """Return when the uncached part of the prompt has to start for its first token to be in time."""
        assert request.objective is not None
        num_tokens = request.num_prompt_tokens - self._state.find_hit(request).num_tokens
        due = request.arrival_time + request.objective.ttft_s
        return due - self._estimate.prefill_seconds(num_tokens, now)

    def refuse_late(self, now: float) -> list[Request]:
        """End and return waiting requests whose first token would be late, or lower their class, as each asks."""
        state, refused = self._state, []
        for _, _, request in state.latest_starts.pop_due(now):
            assert request.objective is not None
            latest_start = self._latest_start(request, now)  # more may be cached than at arrival
            if latest_start > now:
                state.latest_starts.push(latest_start, request, len(state.requests))
            elif request.objective.refuses:
                late_s = max(now - request.latest_start, 0.0)
                request.error = DeadlineExceeded(self._late_text(request, request.objective.ttft_s + late_s))
                state.end(request, FinishReason.ERROR, now)
                state.stats.num_hopeless += 1
                refused.append(request)
            else:
                state.demote(request, now)
        return refused

    @staticmethod
    def _late_text(request: Request, expected: float) -> str:
        assert request.objective is not None
        return (
            f"the first token is expected {_ms(expected)} ms after the arrival, and ttft_ms is "
            f"{1e3 * request.objective.ttft_s:g}"
        )

    def _queue_seconds(self, service_class: Priority, now: float) -> float:
        state = self._state
        has_free_rows = state.num_waiting < min(len(state.columns.free_rows), state.config.max_num_seqs)
        num_ahead = state.waiting.num_tokens_ahead(service_class)
        return self._estimate.queue_seconds(num_ahead, now, has_free_rows=has_free_rows)

    def _check_load(self, requests: Sequence[Request], num_tokens: int, service_class: Priority, now: float) -> None:
        request, count = requests[0], len(requests)
        self.check_deadline(request, service_class, now)
        try:
            self._tenants.check(request.tenant, count, count * num_tokens, now)
            if request.lora is not None:
                self._lora_limits.check(request.lora.name, count, count * num_tokens, now)
        except Busy:
            self._state.stats.num_rate_limited += 1
            raise
        if (limit := self._state.config.breaker_queue_time_s) is not None:
            for oldest in self._state.waiting.oldest_by_class():
                if oldest is not None and now - oldest.arrival_time > limit:  # it may never start
                    self.breaker.observe_queue_time(now - oldest.arrival_time, oldest.priority, now)
        self.breaker.check(service_class, now)
        self._tenants.reserve(requests, num_tokens, now)
        self._lora_limits.reserve(requests, num_tokens, now)

    def _evict(self, victim: Request, service_class: Priority, now: float) -> list[Request]:
        taker = "a request of a tenant with fewer waiting for its weight took the place of this one"
        if service_class < victim.service_class:
            taker = (
                f"a request of class {service_class.name} took the place of this one, of class "
                f"{victim.service_class.name}"
            )
        fill = ", ".join(self._fill())
        error = Busy(f"waiting set is full: {fill}; {taker}", retry_after_ms=self.retry_after_ms(now))
        members = [*victim.followers, victim]
        for member in members:
            member.error = error
            self._state.end(member, FinishReason.ERROR, now)
            self._state.stats.evicted_by_class[member.priority - 1] += 1
        return members

    def _check_size(self, request: Request, count: int) -> None:
        """Raise `InvalidRequest` if `count` such requests could never wait together or run."""
        limits, kv = self._state.config, self._state.kv
        num_prompt_tokens = request.num_prompt_tokens
        limit = min(limits.max_model_len, kv.num_blocks * kv.block_size + 1)  # the last token is never cached
        check_lengths(num_prompt_tokens, request.max_tokens, request.sampling.min_tokens, limit)
        if count > limits.max_waiting_requests:
            raise InvalidRequest(f"n is {count}: at most {limits.max_waiting_requests} requests may wait")
        if count * num_prompt_tokens > limits.max_waiting_tokens:
            raise PromptTooLarge(
                f"prompt of {num_prompt_tokens} tokens{_times(',', count)}: at most {limits.max_waiting_tokens} "
                "tokens may wait"
            )

    def choose_evictions(self, request: Request, count: int, service_class: Priority, now: float) -> list[Request]:
        """Return at most `MAX_DISPLACED` requests to evict. Raise `WaitingSetFull`."""
        limits, waiting = self._state.config, self._state.waiting
        # a lowered limit evicts nothing
        num_requests = count - max(limits.max_waiting_requests - waiting.num_new, 0)
        num_tokens = count * request.num_prompt_tokens - max(limits.max_waiting_tokens - waiting.num_new_tokens, 0)
        victims: list[Request] = []
        num_displaced = 0
        candidates = waiting.displaceable(request, count, service_class)
        while num_requests > 0 or num_tokens > 0:
            victim = next(candidates, None) if num_displaced < MAX_DISPLACED else None
            if victim is None:
                raise self.waiting_room(now).refusal(self._what_is_full(request, count))
            size = 1 + len(victim.followers)
            victims.append(victim)
            num_displaced += size
            num_requests -= size
            num_tokens -= size * victim.num_tokens
        return victims

    def waiting_room(self, now: float) -> WaitingRoom:
        waiting, limits = self._state.waiting, self._state.config
        return WaitingRoom(
            num_requests=waiting.num_new,
            max_requests=limits.max_waiting_requests,
            num_tokens=waiting.num_new_tokens,
            max_tokens=limits.max_waiting_tokens,
            lowest_class=waiting.lowest_class,
            retry_after_ms=self.retry_after_ms(now),
            shortage=self._state.shortage(),
        )

    def retry_after_ms(self, now: float) -> int:
        """Return the time until half of the waiting set should have started."""
        if self._start_interval is None or self._last_start is None:
            return _FIRST_RETRY_MS
        waiting = self._state.waiting
        silence = now - max(self._last_start, waiting.oldest_arrival or 0.0)
        estimate = 1e3 * max(self._start_interval, silence) * waiting.num_new / 2
        return round(min(max(estimate, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _fill(self) -> tuple[str, str]:
        limits, waiting = self._state.config, self._state.waiting
        return (
            f"{waiting.num_new} of {limits.max_waiting_requests} requests",
            f"{waiting.num_new_tokens} of {limits.max_waiting_tokens} tokens",
        )

    def _what_is_full(self, request: Request, count: int) -> str:
        waiting, (requests, tokens) = self._state.waiting, self._fill()
        if waiting.num_new + count > self._state.config.max_waiting_requests:
            several = "" if count == 1 else f", and this one asks for {count} sequences"
            return f"{requests}{waiting.own_part(request)}{several}"
        return f"{tokens}, and this prompt has {request.num_prompt_tokens}{_times('', count)}"

    def check_deadline(self, request: Request, service_class: Priority, now: float) -> None:
        """Raise `DeadlineExceeded` if the first token is expected after the deadline."""
        if request.deadline is None:
            return
        state, left = self._state, request.deadline - now
        if left <= 0.0:
            raise DeadlineExceeded(
                f"the deadline passed {_ms(-left)} ms before the request arrived: give it more time (deadline_ms)"
            )
        if not state.requests:
            return
        num_tokens = request.num_prompt_tokens - state.find_hit(request).num_tokens
        expected = self._queue_seconds(service_class, now) + self._estimate.prefill_seconds(num_tokens, now)
        if expected > left:
            num_ahead = state.waiting.num_tokens_ahead(service_class)
            raise DeadlineExceeded(
                f"the deadline is in {_ms(left)} ms, and the first token is expected in {_ms(expected)} ms: "
                f"{num_ahead} tokens wait ahead, and {num_tokens} tokens of the prompt are to be computed"
            )


def _times(comma: str, count: int) -> str:
    return "" if count == 1 else f"{comma} {count} times"


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)
