"""Rules of the scheduler as plain loops over all requests, to compare the real one with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.tenants import limits_of

Key = tuple[float, ...]


@dataclass
class Standing:
    """State of a request in the model."""

    number: int  # of its arrival
    service_class: Priority
    waits_since: float  # in this class; infinity: it does not age
    soft_deadline: float | None
    num_cached: int  # tokens of its prompt that were in the cache when its place was chosen
    was_over_quota: bool = False
    is_overdue: bool = False


def follows(request: Request) -> bool:
    """Return whether it waits for its leader to compute the prompt that they share."""
    return request.leader is not None and request in request.leader.followers


class Model:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.standings: dict[str, Standing] = {}
        self.num_aged = 0
        self.num_dropped = 0

    def add(self, request: Request) -> None:
        self.standings[request.request_id] = Standing(
            len(self.standings),
            request.priority,
            request.arrival_time,
            request.soft_deadline,
            request.num_cached_tokens,
        )

    def drop_over_quota(self, request: Request, now: float) -> None:
        standing = self.standings[request.request_id]
        assert not standing.was_over_quota, "dropped twice for one quota"
        standing.was_over_quota = True
        self._drop(standing, now)

    def pass_time(self, requests: Iterable[Request], prefilling: set[str], now: float) -> None:
        """Lift, then drop requests that have not ended; followers go with their leader.

        A running request ages until all of its prompt is scheduled: `prefilling` has the ids until then.
        """
        for request in requests:
            standing = self.standings[request.request_id]
            if request.state is RequestState.RUNNING and request.request_id not in prefilling:
                if standing.waits_since + self.config.ageing_s <= now:
                    standing.waits_since = math.inf
            elif not follows(request):
                self._lift(standing, now)
        for request in requests:
            standing = self.standings[request.request_id]
            if standing.soft_deadline is not None and standing.soft_deadline <= now:
                standing.soft_deadline = None
                if standing.service_class < Priority.LOW and not follows(request):
                    self.num_dropped += 1
                    self._drop(standing, now)
                    standing.num_cached = request.num_cached_tokens
        self.follow(requests)

    def follow(self, requests: Iterable[Request]) -> None:
        """Put followers in the class of their leader, with its drops."""
        for request in requests:
            if request.leader is not None and follows(request):
                standing, leading = self.standings[request.request_id], self.standings[request.leader.request_id]
                standing.service_class, standing.was_over_quota = leading.service_class, leading.was_over_quota

    def release(self, request: Request, now: float) -> None:
        """Let a follower wait by itself from now on; it has waited in its class as long as its leader."""
        assert request.leader is not None
        leading = self.standings[request.leader.request_id]
        has_aged = leading.is_overdue or math.isinf(leading.waits_since)
        self.standings[request.request_id].waits_since = now if has_aged else leading.waits_since

    def preempt(self, request: Request, now: float) -> None:
        standing = self.standings[request.request_id]
        standing.waits_since, standing.is_overdue = now, False
        standing.num_cached = request.num_cached_tokens

    def class_of(self, request: Request) -> Priority:
        return self.standings[request.request_id].service_class

    def counts(self, request: Request) -> int:
        """Return the class, where classes count."""
        return 0 if self.config.policy == "fifo" else self.class_of(request)

    def arrival(self, request: Request) -> Key:
        return request.arrival_time, self.standings[request.request_id].number

    def key(self, request: Request) -> Key:
        """Return the place of a waiting request; under `fair`, among the requests of its tenant."""
        own: Key = ()
        left = request.predicted_output_tokens - request.num_output_tokens
        match self.config.policy:
            case "sjf":
                own = (max(left, 0.0),)
            case "deadline":
                due = request.soft_deadline if request.deadline is None else request.deadline
                own = (math.inf if due is None else due,)
            case "density":
                prompt, output = request.num_prompt_tokens, max(request.predicted_output_tokens, 1.0)
                computed = prompt - self.standings[request.request_id].num_cached + output
                own = (-computed / (prompt * output + output * output / 2),)
        if own and self.standings[request.request_id].is_overdue:
            own = (-math.inf,)
        return (self.counts(request), *own, *self.arrival(request))

    def level(self, request: Request) -> Key:
        """Return the part of the key that is equal in requests of which the second may have what the first leaves."""
        return self.key(request)[: 2 if self.config.policy == "deadline" else 1]

    def shared_level(self, request: Request) -> Key:
        """Return the highest level that may have tokens that this request leaves: its class before it aged."""
        level = self.level(request)
        return level if self.config.policy == "fifo" else (max(level[0], request.priority), *level[1:])

    def victims_of(
        self, newcomer: Request, count: int, service_class: int, waiting: list[Request]
    ) -> list[str] | None:
        """Return the requests, none started, that give way to `count` newcomers, or None if they are too few.

        A group goes as one, its followers first.
        """
        left = sorted(waiting, key=lambda request: (self.class_of(request), *self.arrival(request)))
        num_tokens = count * newcomer.num_tokens
        victims: list[str] = []
        while (
            len(left) + count > self.config.max_waiting_requests
            or sum(request.num_tokens for request in left) + num_tokens > self.config.max_waiting_tokens
        ):
            victim = self._victim_of(newcomer, count, service_class, left)
            if victim is None:
                return None
            for member in (*victim.followers, victim):
                left.remove(member)
                victims.append(member.request_id)
        return victims

    def _victim_of(self, newcomer: Request, count: int, service_class: int, left: list[Request]) -> Request | None:
        """Return the last request of `left`, which is in order, that may go."""
        entries = [request for request in left if not follows(request)]
        lower = [request for request in entries if self.class_of(request) > service_class]
        if self.config.policy == "fair":
            tenants = self.config.tenants
            best = limits_of(tenants, newcomer.tenant).max_priority
            strangers = [request for request in lower if request.tenant != newcomer.tenant]
            outranked = [
                request for request in strangers if limits_of(tenants, request.tenant).max_priority > service_class
            ]
            if outranked:
                return outranked[-1]
            own = self.crowd(newcomer.tenant, left) + count / limits_of(tenants, newcomer.tenant).weight
            last = {request.tenant: request for request in entries if request.tenant != newcomer.tenant}
            others = [tenant for tenant, one in last.items() if max(one.priority, self.class_of(one)) >= best]
            biggest = max(others, key=lambda tenant: (self.crowd(tenant, left), tenant), default="")
            if others and self.crowd(biggest, left) > own:
                return last[biggest]
            lower = [request for request in lower if request.tenant == newcomer.tenant]
        return lower[-1] if lower else None

    def may_overtake(self, request: Request, rival: Request, now: float) -> bool:
        """Return whether a cached prefix may take a new request past a new one that came earlier in its class."""
        return (
            self.config.policy in ("priority", "fair")
            and self.class_of(request) == self.class_of(rival)
            and rival.arrival_time > now - self.config.ageing_s
        )

    def crowd(self, tenant: str, waiting: list[Request]) -> float:
        """Return the number of waiting requests divided by the weight of the tenant."""
        return sum(request.tenant == tenant for request in waiting) / limits_of(self.config.tenants, tenant).weight

    def protected(self, running: list[Request]) -> Request | None:
        return min(running, key=lambda r: (self.counts(r), *self.arrival(r)), default=None)

    def _lift(self, standing: Standing, now: float) -> None:
        while standing.service_class > Priority.HIGH and standing.waits_since + self.config.ageing_s <= now:
            standing.service_class = Priority(standing.service_class - 1)
            standing.waits_since += self.config.ageing_s
            self.num_aged += 1
        if standing.service_class <= Priority.HIGH and standing.waits_since + self.config.ageing_s <= now:
            standing.is_overdue = True

    def _drop(self, standing: Standing, now: float) -> None:
        standing.service_class = Priority(min(standing.service_class + 1, Priority.LOW))
        standing.waits_since, standing.is_overdue = now, False
