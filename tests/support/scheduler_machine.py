"""Random life of a scheduler: arrivals, groups, deadlines, cancels, steps, faults, in tiny pools and waiting sets.

Output, sharing and the batch protocol are checked by `Driver` and `FakeRunner`; here are the rules and the promises
that concern more than one request. Classes, victims and order are compared with those of `scheduler_model.Model`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.budget_checks import check_budget, check_shares
from support.fake_runner import VOCAB_SIZE
from support.scheduler_model import Model
from support.scheduling import Driver, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import Busy, DeadlineExceeded, InternalError, InvalidRequest, NumericError
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.stats import SchedulerStats
from tidewheel.scheduler.strategy import StrategyConfig
from tidewheel.tenants import TenantLimits

MAX_WAITING_REQUESTS = 6
MAX_WAITING_TOKENS = 120

# Mostly pools of 24 to 64 slots: a few requests fill them, so that blocks run out and come back all the time.
POOLS = st.one_of(
    st.sampled_from([(24, 1), (32, 1), (16, 2), (24, 2), (8, 4), (12, 4), (4, 16)]),
    st.tuples(st.integers(4, 32), st.sampled_from([1, 2, 4, 16])),
)

TENANTS = {
    "quota": TenantLimits(max_blocks=3),
    "slow": TenantLimits(requests_per_s=0.5, weight=0.5),
}

SETTINGS = st.fixed_dictionaries(
    {
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "max_num_seqs": st.sampled_from([4, 6, 4, 6, 3, 2, 1]),
        "max_num_batched_tokens": st.one_of(st.sampled_from([8, 24]), st.integers(1, 24)),
        "max_inflight_steps": st.sampled_from([2, 1]),
        "policy": st.sampled_from(["priority", "fifo", *POLICIES]),
        "watermark": st.sampled_from([0.0, 0.25]),
        "ageing_s": st.sampled_from([10.0, 3.0, 1000.0]),
        "max_preemptions": st.sampled_from([1, 4, 1, 0]),
        "long_prefill_token_threshold": st.sampled_from([None, 3]),
        "num_host_blocks": st.sampled_from([0, 0, 6]),
        "strategy": st.sampled_from(
            [
                *[StrategyConfig()] * 8,
                StrategyConfig(name="static", batch_size=2),
                StrategyConfig(name="dynamic"),
                StrategyConfig(name="predictive"),
                StrategyConfig(name="hybrid", hybrid_threshold=3, hybrid_backlog=4),
            ]
        ),
        "enable_seqs_governor": st.sampled_from([*[False] * 7, True]),
        "target_tpot_s": st.sampled_from([None, None, 0.5]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(settings=SETTINGS, pool=POOLS, seed=st.integers(0, 99))
    def start(self, settings: dict[str, Any], pool: tuple[int, int], seed: int) -> None:
        if not settings["enable_prefix_caching"]:
            settings["num_host_blocks"] = 0
        self.driver = Driver(
            num_blocks=pool[0],
            block_size=pool[1],
            max_waiting_requests=MAX_WAITING_REQUESTS,
            max_waiting_tokens=MAX_WAITING_TOKENS,
            preemption_mode="swap" if settings["num_host_blocks"] else "auto",
            tenants=TENANTS,
            **settings,
        )
        self.model = Model(self.driver.config)
        self.random = random.Random(seed)
        self.base = self.random.choices(range(10), k=30)
        self.num_requests = 0
        self.num_joined = 0  # since the running set was empty
        self.ready: set[str] = set()  # ids of requests that have computed their prompt, but for its last token
        self.num_over_quota = self.num_evicted = self.num_expired = self.num_hopeless = 0

    def having(self, *states: RequestState) -> list[Request]:
        return [request for request in self.driver.requests.values() if request.state in states]

    def unfinished(self) -> list[Request]:
        return self.having(RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)

    # --- arrivals ---------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), priority=st.sampled_from(Priority))
    def add(self, count: int, priority: Priority) -> None:
        for _ in range(count):
            self.add_group([self.random_request(priority)])

    @rule(count=st.integers(2, 4), priority=st.sampled_from(Priority))
    def add_some(self, count: int, priority: Priority) -> None:
        """Sequences that share a prompt."""
        leader = self.random_request(priority)
        self.add_group([leader, *(self.twin(leader) for _ in range(count - 1))])

    def random_request(self, priority: Priority) -> Request:
        draw = self.random
        shared = draw.choice([0, 4, 8, 16, 30])  # at times all of it: the whole prompt may then be in the cache
        prompt = [*self.base[:shared], *draw.choices(range(10), k=draw.randint(0 if shared else 1, 4))]
        max_tokens = draw.choice([1, 2, 8, 16, 24, 24])
        self.driver.now += draw.choice([0.0, 1.0])
        time_left = draw.choice([*[None] * 16, 0.0, 9.0, 40.0])
        soft_time_left = draw.choice([None, None, None, 2.0, 12.0])
        return make_request(
            self.next_id(),
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(draw.choice([0, 0, 3, 8]), max_tokens),
            priority=priority,
            arrival_time=self.driver.now,
            stop_token_ids=tuple(draw.sample(range(VOCAB_SIZE), k=draw.randint(0, 3))),
            cache_salt=draw.choice(["", "", "x"]),
            tenant=draw.choice(["", "", "", "other", "quota", "slow"]),
            session_id=draw.choice(["", "", "", "s" if self.driver.kv.enable_prefix_caching else ""]),
            session_ttl=20.0,
            deadline=None if time_left is None else self.driver.now + time_left,
            soft_deadline=None if soft_time_left is None else self.driver.now + soft_time_left,
        )

    def twin(self, leader: Request) -> Request:
        return make_request(
            self.next_id(),
            leader.prompt_token_ids.tolist(),
            max_tokens=leader.max_tokens,
            leader=leader,
            **{
                name: getattr(leader, name)
                for name in (
                    "priority", "arrival_time", "stop_token_ids", "cache_salt", "tenant", "deadline", "soft_deadline",
                )
            },
        )  # fmt: skip

    def next_id(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests - 1}"

    def add_group(self, requests: list[Request]) -> None:
        leader, driver = requests[0], self.driver
        never_fits = leader.max_num_tokens - 1 > driver.runner.num_blocks * driver.runner.block_size
        never_fits |= len(requests) * leader.num_tokens > MAX_WAITING_TOKENS
        is_late = leader.deadline is not None and leader.deadline <= driver.now
        service_class = min(leader.priority + self.is_over_quota(leader), Priority.LOW)
        waiting = self.having(RequestState.WAITING)
        victims = self.model.victims_of(leader, len(requests), service_class, waiting)
        before = driver.scheduler.stats()
        try:
            evicted = driver.add_group(requests)
        except InvalidRequest:
            assert never_fits
        except DeadlineExceeded:
            assert leader.deadline is not None and victims is not None and not never_fits
            self.num_hopeless += 1
        except Busy as error:
            is_limited = leader.tenant == "slow" and "requests_per_s" in str(error)
            assert not never_fits and (victims is None or is_limited)
            assert error.retry_after_ms is not None and error.retry_after_ms > 0
        else:
            assert not never_fits and not is_late
            assert [request.request_id for request in evicted] == victims
            self.num_evicted += len(evicted)
            self.accept(requests, Priority(service_class))
            return
        assert unchanged(driver.scheduler.stats(), before)

    def accept(self, requests: list[Request], service_class: Priority) -> None:
        for request in requests:
            self.model.add(request)
            if service_class is not request.priority:
                self.num_over_quota += 1
                self.model.standings[request.request_id].service_class = service_class
            if self.is_over_quota(requests[0]):
                self.model.standings[request.request_id].was_over_quota = True

    def is_over_quota(self, request: Request) -> bool:
        """Blocks of the tenant's running requests and sessions, and those that the request needs."""
        quota = TENANTS.get(request.tenant, TenantLimits()).max_blocks
        if quota is None:
            return False
        running = [r for r in self.having(RequestState.RUNNING) if r.tenant == request.tenant]
        used = sum(len(self.driver.runner.rows[r.row].block_table) for r in running)
        used += self.driver.kv.session_blocks(request.tenant)
        return used + -(-request.num_tokens // self.driver.runner.block_size) > quota

    # --- steps ------------------------------------------------------------------------------------------------

    @rule()
    def schedule(self) -> None:
        driver = self.driver
        now = driver.now + 1.0
        late = [r.request_id for r in self.unfinished() if r.deadline is not None and r.deadline <= now]
        in_time = [r for r in self.unfinished() if r.request_id not in late]
        is_full = len(driver.in_flight) >= driver.config.max_inflight_steps
        if not is_full:
            self.model.pass_time(in_time, now)
        running = [r for r in in_time if r.state is RequestState.RUNNING]
        computed = {r.request_id: driver.num_computed_tokens(r) for r in running}
        self.ready |= {r.request_id for r in running if computed[r.request_id] >= r.num_prompt_tokens - 1}
        started = {r.request_id for r in in_time if r.first_scheduled_time is not None}
        num_preemptions = {r.request_id: r.num_preemptions for r in running}
        if not running:
            self.num_joined = 0
        could_run = in_time and not driver.in_flight
        batch = driver.schedule()
        assert sorted(late) == sorted(r.request_id for r in driver.expired)
        self.num_expired += len(late)
        assert batch is not None or not could_run, "work is left, nothing is in flight and nothing is scheduled"
        self.follow_quotas(now)
        victims = [r for r in running if r.num_preemptions > num_preemptions[r.request_id]]
        for request in victims:  # also those that are back already
            self.model.preempt(request, now)
        self.check_victims(running, victims, computed, num_preemptions)
        if batch is not None:
            self.check_order(batch, started)
            waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
            check_budget(driver, batch, [request for request in waiting if not self.may_be_parked(request)])
            check_shares(driver, batch, self.model)

    def follow_quotas(self, now: float) -> None:
        """A request that reaches the head while its tenant is over its quota drops a class."""
        for request in self.unfinished():
            if request.service_class > self.model.class_of(request):
                assert request.tenant == "quota"
                self.num_over_quota += 1
                self.model.drop_over_quota(request, now)

    def check_victims(
        self,
        were_running: list[Request],
        victims: list[Request],
        computed: dict[str, int],
        num_preemptions: dict[str, int],
    ) -> None:
        """The lowest class first, in it the one that loses least; never the oldest of the highest class."""
        model, limit = self.model, self.driver.config.max_preemptions
        protected = model.protected(were_running)
        stayed = [r for r in were_running if r not in victims and r is not protected]
        assert protected not in victims

        def worth(request: Request) -> tuple[float, ...]:
            return (computed[request.request_id], *(-part for part in model.arrival(request)))

        for victim in victims:
            for other in stayed:
                if model.counts(other) < model.counts(victim) or num_preemptions[other.request_id] >= limit:
                    continue
                assert num_preemptions[victim.request_id] < limit
                assert model.counts(other) == model.counts(victim) and worth(victim) < worth(other)

    def check_order(self, batch: ScheduledBatch, started: set[str]) -> None:
        """Nobody enters while somebody who is served earlier waits; decodes are never left out for prompts."""
        driver, config = self.driver, self.driver.config
        entered = [driver.requests[new.request_id] for new in batch.new_rows]
        waiting = [r for r in self.having(RequestState.WAITING, RequestState.PREEMPTED) if not self.may_be_parked(r)]
        for request in entered:
            assert request.deadline is None or request.deadline > driver.now
            assert not self.may_be_parked(request) or request.request_id in started
            rivals = [r for r in waiting if config.policy != "fair" or r.tenant == request.tenant]
            assert all(self.model.key(request) < self.model.key(rival) for rival in rivals)
        self.num_joined += sum(request.request_id not in started for request in entered)
        assert config.strategy.name != "static" or self.num_joined <= config.strategy.batch_size
        assert batch.num_scheduled_tokens.max() <= (config.long_prefill_token_threshold or 99)
        if len(driver.in_flight) == 1:
            rows = driver.runner.rows
            for row_index in rows.keys() - batch.rows.tolist():
                assert len(rows[row_index].token_ids) - rows[row_index].num_computed_tokens > 1

    def may_be_parked(self, request: Request) -> bool:
        """Its leader is still to compute the prompt that they share."""
        leader = request.leader
        return leader is not None and not leader.is_finished and leader.request_id not in self.ready

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self) -> None:
        outputs = self.driver.apply()
        for request in outputs.finished:
            if request.finish_reason is FinishReason.ERROR:
                assert isinstance(request.error, NumericError)
                assert request.request_id in self.driver.runner.not_finite

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            while len(self.driver.in_flight) < self.driver.config.max_inflight_steps:
                self.schedule()
                if not self.driver.in_flight or self.random.random() < 0.2:
                    break
            if self.driver.in_flight:
                self.apply()
            self.keeps_its_promises()

    @rule(kind=st.sampled_from(["cancel", "cancel", "cancel", "numerics", "fail_all"]), number=st.integers(0, 40))
    def mishap(self, kind: str, number: int) -> None:
        """Also of requests that are unknown, in flight, or over."""
        if kind == "cancel":
            self.driver.cancel(f"r{number}", FinishReason.DEADLINE if number % 4 == 0 else FinishReason.CANCELLED)
        elif kind == "numerics":
            self.driver.runner.not_finite.add(f"r{number}")
        elif number % 8 == 0:
            self.driver.fail_all(InternalError("the device is lost"))

    # --- always -----------------------------------------------------------------------------------------------

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        scheduler.check_invariants()
        stats = scheduler.stats()
        waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
        new = self.having(RequestState.WAITING)
        assert stats.num_running == len(self.having(RequestState.RUNNING)) <= self.driver.config.max_num_seqs
        assert stats.num_waiting == len(waiting)
        assert stats.num_waiting_tokens == sum(request.num_tokens for request in waiting)
        assert stats.waiting_by_class == tuple(sum(r.priority is p for r in waiting) for p in Priority)
        assert stats.num_preemptions == sum(r.num_preemptions for r in self.driver.requests.values())
        assert len(new) <= MAX_WAITING_REQUESTS
        assert sum(request.num_tokens for request in new) <= MAX_WAITING_TOKENS
        for request in self.unfinished():
            assert request.service_class is self.model.class_of(request)
        assert (stats.num_aged, stats.num_downgraded_deadline) == (self.model.num_aged, self.model.num_dropped)
        assert (stats.num_downgraded_quota, stats.num_evicted) == (self.num_over_quota, self.num_evicted)
        assert (stats.num_expired, stats.num_hopeless) == (self.num_expired, self.num_hopeless)
        started = [r for r in self.driver.requests.values() if r.first_scheduled_time is not None]
        assert stats.started_by_class == tuple(sum(r.priority is p for r in started) for p in Priority)

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None  # then the driver may be half way through a step
        if hasattr(self, "driver") and not has_failed:
            self.driver.run()


def unchanged(after: SchedulerStats, before: SchedulerStats) -> bool:
    """But for the counts of refusals."""
    counts = {"num_hopeless": 0, "num_rate_limited": 0, "tenants": {}}
    return after._replace(**counts) == before._replace(**counts)
