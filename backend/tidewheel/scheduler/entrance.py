from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tidewheel.errors import Busy, DeadlineExceeded, InvalidRequest, TidewheelError
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.admission import Admission
from tidewheel.scheduler.breaker import Breaker
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.deadlines import check_deadline
from tidewheel.scheduler.service_class import dropped, is_over_quota
from tidewheel.scheduler.state import State
from tidewheel.scheduler.step_time import ServiceEstimate
from tidewheel.scheduler.tenancy import TenantTable
from tidewheel.scheduler.tenant_counts import TenantCounts
from tidewheel.stats import WaitingRoom


class Entrance:
    """Admission checks, which learn from starts and ends."""

    def __init__(self, config: SchedulerConfig, state: State, estimate: ServiceEstimate) -> None:
        self._config = config
        self._state = state
        self._estimate = estimate
        self._admission = Admission(config, state.kv.num_blocks, state.kv.block_size)
        self._tenants = TenantTable(config.tenants)
        self._tenant_counts = TenantCounts(config.tenants)
        self.breaker = Breaker(config.breaker_error_rate, config.breaker_queue_time_s)
        state.stats.tenants = self._tenant_counts.figures
        state.stats.num_shed_by_class = self.breaker.num_shed
        self.predictor = state.predictor

    def admit(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Queue all requests, which share prompt and limits, or raise; return the evicted ones.

        The tenant's limits lower their class. `InvalidRequest` precedes `Busy`, so that no client retries the
        impossible.
        """
        tenant, count = requests[0].tenant, len(requests)
        self._tenant_counts.observe_arrival(tenant, count)
        for request in requests:
            request.priority = self._config.limits_of(request.tenant).granted(request.priority)
        try:
            return self._admit(requests, now)
        except TidewheelError:
            self._tenant_counts.observe_refusal(tenant, count)
            raise

    def observe_refused(self, refused: Mapping[str, int]) -> None:
        for tenant, count in refused.items():
            self._tenant_counts.observe_arrival(tenant, count)
            self._tenant_counts.observe_refusal(tenant, count)

    def _admit(self, requests: Sequence[Request], now: float) -> list[Request]:
        state, request, count = self._state, requests[0], len(requests)
        self._check_ids(requests)
        self._admission.check_limits(request, count)
        over_quota = is_over_quota(state, request)
        service_class = dropped(request.priority) if over_quota else request.priority
        victims = self._admission.find_room(request, count, service_class, state.waiting, now)
        predicted = self.predictor.predict(request.tenant, request.num_prompt_tokens, request.max_tokens)
        self._check_load(requests, request.num_prompt_tokens + math.ceil(predicted), service_class, now)
        evicted = [member for victim in victims for member in self._evict(victim, service_class, now)]
        for newcomer in requests:
            newcomer.predicted_output_tokens = predicted
            newcomer.service_class = service_class
            newcomer.was_over_quota = over_quota
            state.stats.num_downgraded_quota += over_quota and service_class is not newcomer.priority
        state.wait(list(requests))
        return evicted

    def room(self, now: float) -> WaitingRoom:
        return self._admission.room(self._state.waiting, now)

    def observe_starts(self, requests: list[Request], now: float) -> None:
        stats = self._state.stats
        for request in requests:
            seconds = max(now - request.arrival_time, 0.0)
            index = request.priority - 1
            stats.started_by_class[index] += 1
            stats.max_wait_by_class[index] = max(stats.max_wait_by_class[index], seconds)
            self._tenant_counts.observe_start(request, seconds)
            self._admission.record_start(now)
            self.breaker.observe_queue_time(seconds, request.priority, now)

    def observe_ends(self, requests: list[Request], now: float) -> None:
        """Settle ended requests.

        Only STOP and LENGTH teach lengths. Refusals and cancels say nothing about engine health.
        """
        for request in requests:
            self._tenants.settle(request, now)
            self._tenant_counts.observe_end(request)
            reason = request.finish_reason
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.predictor.observe(
                    request.tenant,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    request.predicted_output_tokens,
                )
                self.breaker.observe_end(False, now)
            elif reason is FinishReason.ERROR and not isinstance(request.error, Busy | DeadlineExceeded):
                self.breaker.observe_end(True, now)

    def _check_ids(self, requests: Sequence[Request]) -> None:
        seen = set()
        for request in requests:
            if request.request_id in self._state.requests or request.request_id in seen:
                raise InvalidRequest(f"request id {request.request_id!r} is in use by a request that has not ended")
            seen.add(request.request_id)

    def _check_load(self, requests: Sequence[Request], num_tokens: int, service_class: Priority, now: float) -> None:
        """Raise `DeadlineExceeded` or `Busy`, or reserve `num_tokens` per request."""
        request, count = requests[0], len(requests)
        try:
            check_deadline(self._state, self._estimate, request, service_class, now)
        except DeadlineExceeded:
            self._state.stats.num_hopeless += 1
            raise
        try:
            self._tenants.check(request.tenant, count, count * num_tokens, now)
        except Busy:
            self._state.stats.num_rate_limited += 1
            raise
        self._observe_oldest(now)
        self.breaker.check(service_class, now)
        self._tenants.reserve(requests, num_tokens, now)

    def _observe_oldest(self, now: float) -> None:
        """Report long waits to the breaker: such requests may never start."""
        limit = self._config.breaker_queue_time_s
        for service_class in Priority if limit is not None else ():
            oldest = self._state.waiting.oldest(service_class)
            seconds = 0.0 if oldest is None else now - oldest.arrival_time
            if oldest is not None and limit is not None and seconds > limit:
                self.breaker.observe_queue_time(seconds, oldest.priority, now)

    def _evict(self, victim: Request, service_class: Priority, now: float) -> list[Request]:
        state = self._state
        error = self._admission.eviction(victim, service_class, state.waiting, now)
        members = [*victim.followers, victim]
        for member in members:
            member.error = error
            state.end(member, FinishReason.ERROR, now)
            state.stats.num_evicted += 1
            state.stats.evicted_by_class[member.priority - 1] += 1
        return members
