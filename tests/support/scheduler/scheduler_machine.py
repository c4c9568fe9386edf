"""Random life of a scheduler: arrivals, groups, deadlines, cancels, steps, faults, in tiny pools and waiting sets.

`SchedulerDriver` and `FakeRunner` check output, sharing and the batch protocol; the machine checks rules and promises
that concern more than one request, and compares classes, victims and order with `scheduler_model.Model`.
"""

from __future__ import annotations

import random
import sys
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from support.engine.fake_runner import VOCAB_SIZE
from support.scheduler.budget_checks import check_budget, check_shares, may_await_prefix, may_overtake
from support.scheduler.invariants import check_invariants
from support.scheduler.need_checks import Blocks, check_decodes, check_need, check_shortage
from support.scheduler.scheduler_model import Model, follows
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import Busy, DeadlineExceeded, InternalError, InvalidRequest, NumericError
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.scheduler.policy import POLICIES
from tidewheel.stats import EngineStats
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
    "free": TenantLimits(max_priority=Priority.NORMAL),
}

SETTINGS = st.fixed_dictionaries(
    {
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "max_num_seqs": st.sampled_from([4, 6, 4, 6, 3, 2, 1]),
        "max_num_batched_tokens": st.one_of(st.sampled_from([8, 24]), st.integers(1, 24)),
        "max_inflight_steps": st.sampled_from([2, 1]),
        "policy": st.sampled_from(["priority", "fifo", *POLICIES]),
        "watermark": st.sampled_from([0.0, 0.25]),
        "admit_by_growth": st.sampled_from([False, False, True]),
        "ageing_s": st.sampled_from([10.0, 3.0, 1000.0]),
        "max_preemptions": st.sampled_from([1, 4, 1, 0]),
        "long_prefill_token_threshold": st.sampled_from([None, 3]),
        "num_host_blocks": st.sampled_from([0, 0, 6]),
        "strategy": st.sampled_from(
            [
                *[{}] * 8,
                {"scheduling_strategy": "static", "batch_size": 2},
                {"scheduling_strategy": "dynamic"},
                {"scheduling_strategy": "predictive"},
                {"scheduling_strategy": "hybrid", "hybrid_threshold": 3, "hybrid_backlog": 4},
            ]
        ),
        "enable_seqs_governor": st.sampled_from([*[False] * 7, True]),
        "target_tpot_ms": st.sampled_from([None, None, 500.0]),
    }
).map(lambda drawn: {name: value for name, value in {**drawn, **drawn["strategy"]}.items() if name != "strategy"})


class SchedulerMachine(RuleBasedStateMachine):
    driver: SchedulerDriver
    bugs: ClassVar[dict[str, Any]] = {}  # settings of the scheduler that driver and model do not know

    @initialize(settings=SETTINGS, pool=POOLS, seed=st.integers(0, 99))
    def start(self, settings: dict[str, Any], pool: tuple[int, int], seed: int) -> None:
        if not settings["enable_prefix_caching"]:
            settings["num_host_blocks"] = 0
        self.driver = SchedulerDriver(
            num_blocks=pool[0],
            block_size=pool[1],
            max_waiting_requests=MAX_WAITING_REQUESTS,
            max_waiting_tokens=MAX_WAITING_TOKENS,
            preemption_mode="swap" if settings["num_host_blocks"] else "auto",
            tenants=TENANTS,
            bugs=self.bugs,
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
        """Add sequences that share a prompt."""
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
        # In this order, and "free" under `fair` alone: recorded lives draw the same numbers again.
        min_tokens = min(draw.choice([0, 0, 3, 8]), max_tokens)
        stop_token_ids = tuple(draw.sample(range(VOCAB_SIZE), k=draw.randint(0, 3)))
        cache_salt = draw.choice(["", "", "x"])
        names = ["", "", "", "other", "quota", "slow"]
        tenant = draw.choice([*names, "free"] if self.driver.config.policy == "fair" else names)
        return make_request(
            self.next_id(),
            prompt,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            priority=TENANTS.get(tenant, TenantLimits()).granted(priority),
            arrival_time=self.driver.now,
            stop_token_ids=stop_token_ids,
            cache_salt=cache_salt,
            tenant=tenant,
            session_id=draw.choice(["", "", "", "s" if self.driver.kv.prefixes.is_enabled else ""]),
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
        victims = self.model.victims_of(leader, len(requests), service_class, self.new())
        is_idle = not self.unfinished()
        before = driver.scheduler.stats()
        try:
            evicted = driver.add_group(requests)
        except InvalidRequest:
            assert never_fits
        except DeadlineExceeded:
            assert leader.deadline is not None and victims is not None and not never_fits
            assert is_late or not is_idle, "an idle engine refuses what it could try"
            self.num_hopeless += 1
        except Busy as error:
            is_limited = leader.tenant == "slow" and "requests_per_s" in str(error)
            assert not never_fits and (victims is None or is_limited)
            assert error.retry_after_ms is not None and error.retry_after_ms > 0
            check_shortage(driver, error)
        else:
            assert not never_fits and not is_late
            assert not any(has_begun(request) for request in evicted)
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

    def new(self) -> list[Request]:
        """Return the requests that may lose their place: neither they nor the leader of their group has started."""
        return [request for request in self.having(RequestState.WAITING) if not has_begun(request)]

    def is_over_quota(self, request: Request) -> bool:
        """Count the blocks of the tenant's running requests and sessions, and the blocks that the request needs."""
        quota = TENANTS.get(request.tenant, TenantLimits()).max_blocks
        if quota is None:
            return False
        running = [r for r in self.having(RequestState.RUNNING) if r.tenant == request.tenant]
        used = sum(len(self.driver.runner.rows[r.row].block_table) for r in running)
        used += self.driver.kv.sessions.num_blocks(request.tenant)
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
            self.model.pass_time(in_time, driver.prefilling(), now)
        running = [r for r in in_time if r.state is RequestState.RUNNING]
        self.ready |= {r.request_id for r in running if driver.num_computed_tokens(r) >= r.num_prompt_tokens - 1}
        started = {r.request_id for r in in_time if r.first_scheduled_time is not None}
        new = {r.request_id for r in in_time if r.is_new}
        num_preemptions = {r.request_id: r.num_preemptions for r in running}
        if not running:
            self.num_joined = 0
        could_run = in_time and not driver.in_flight
        followers = [request for request in in_time if follows(request)]
        blocks, ending = Blocks(driver, late), driver.ending()
        batch = driver.schedule()
        self.note_releases(followers, now)
        assert sorted(late) == sorted(r.request_id for r in driver.expired)
        self.num_expired += len(late)
        assert batch is not None or not could_run, "work is left, nothing is in flight and nothing is scheduled"
        self.follow_quotas(now)
        victims = [r for r in running if r.num_preemptions > num_preemptions[r.request_id]]
        assert not ending & {request.request_id for request in victims}, "a row left that had all its tokens"
        for request in victims:  # also those that are back already
            self.model.preempt(request, now)
        entered = [driver.requests[entry.request.request_id] for entry in batch.new_rows] if batch is not None else []
        self.check_victims(running, victims, entered)
        if driver.config.max_inflight_steps == 1 and not is_full:
            check_need(driver, blocks, victims, entered, self.model)
        if batch is not None:
            self.check_order(batch, started, victims, new)
            check_decodes(driver, batch, blocks, victims, self.model)
            check_budget(driver, batch, self.waiting(), is_scarce=blocks.are_scarce)
            check_shares(driver, batch, self.model, len(victims), self.waiting(), new)

    def note_releases(self, followers: list[Request], now: float) -> None:
        """Let followers age by themselves once their leader has let them go."""
        for request in followers:
            if not request.is_finished and not follows(request):
                self.model.release(request, now)

    def waiting(self) -> list[Request]:
        """Return the requests without a row, except followers."""
        return [r for r in self.having(RequestState.WAITING, RequestState.PREEMPTED) if not follows(r)]

    def enterable(self, victims: list[Request]) -> list[Request]:
        """Return the waiting requests that only rows, blocks, budget and strategy can keep out."""
        return [request for request in self.waiting() if not may_await_prefix(self.driver, request, victims)]

    def follow_quotas(self, now: float) -> None:
        """Drop the class of a request at the head whose tenant is over its quota, and of its followers."""
        for request in self.unfinished():
            if follows(request):
                continue
            if request.service_class > self.model.class_of(request):
                assert request.tenant == "quota"
                self.num_over_quota += 1
                self.model.drop_over_quota(request, now)
        self.model.follow(self.unfinished())

    def check_victims(self, were_running: list[Request], victims: list[Request], entered: list[Request]) -> None:
        """Check that the oldest of the highest class leaves only for a CRITICAL request."""
        waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
        has_critical = self.driver.config.policy != "fifo" and any(
            request.service_class is Priority.CRITICAL for request in (*entered, *waiting)
        )
        assert self.model.protected(were_running) not in victims or has_critical

    def check_order(self, batch: ScheduledBatch, started: set[str], victims: list[Request], new: set[str]) -> None:
        """Check that nothing enters while a request that is served earlier waits.

        Exceptions are requests that wait for a prefix or the strategy, or that may be overtaken.
        """
        driver, config, model = self.driver, self.driver.config, self.model
        entered = [driver.requests[entry.request.request_id] for entry in batch.new_rows]
        for request in entered:
            assert request.deadline is None or request.deadline > driver.now
            leader = request.leader
            assert leader is None or leader.is_finished or leader.request_id in self.ready
            for rival in self.enterable(victims):
                if config.policy == "fair" and (rival.tenant != request.tenant or rival in victims):
                    continue  # where tenants take turns, it may have left its row after this one entered
                if config.scheduling_strategy != "continuous" and not has_begun(rival):
                    continue
                earlier = model.key(request) < model.key(rival)
                assert earlier or may_overtake(driver, model, request, rival, new)
        joined = [r for r in entered if r.request_id not in started and (r.leader is None or r.leader.is_new)]
        self.num_joined += len(joined)
        assert config.scheduling_strategy != "static" or self.num_joined <= config.batch_size
        assert batch.num_scheduled_tokens.max() <= (config.long_prefill_token_threshold or 99)

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self) -> None:
        followers = [request for request in self.unfinished() if follows(request)]
        outputs = self.driver.apply()
        self.note_releases(followers, self.driver.now)
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
        """Cancel or fail a request, which may be unknown, in flight, or over."""
        followers = [request for request in self.unfinished() if follows(request)]
        if kind == "cancel":
            self.driver.cancel(f"r{number}", FinishReason.DEADLINE if number % 4 == 0 else FinishReason.CANCELLED)
        elif kind == "numerics":
            self.driver.runner.not_finite.add(f"r{number}")
        elif number % 8 == 0:
            self.driver.fail_all(InternalError("the device is lost"))
        self.note_releases(followers, self.driver.scheduler._now)

    # --- always -----------------------------------------------------------------------------------------------

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        check_invariants(scheduler)
        stats = scheduler.stats()
        waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
        new = self.new()
        assert stats.num_running == len(self.having(RequestState.RUNNING)) <= self.driver.config.max_num_seqs
        assert stats.num_waiting == len(waiting)
        assert stats.num_waiting_tokens == sum(request.num_tokens for request in waiting)
        assert stats.waiting_by_class == [sum(r.priority is p for r in waiting) for p in Priority]
        assert stats.num_preemptions == sum(r.num_preemptions for r in self.driver.requests.values())
        assert len(new) <= MAX_WAITING_REQUESTS
        assert sum(request.num_tokens for request in new) <= MAX_WAITING_TOKENS
        for request in self.unfinished():
            assert request.service_class is self.model.class_of(request)
        assert (stats.num_aged, stats.num_downgraded_deadline) == (self.model.num_aged, self.model.num_dropped)
        assert (stats.num_downgraded_quota, sum(stats.evicted_by_class)) == (self.num_over_quota, self.num_evicted)
        assert (stats.num_expired, stats.num_hopeless) == (self.num_expired, self.num_hopeless)
        started = [r for r in self.driver.requests.values() if r.first_scheduled_time is not None]
        assert stats.started_by_class == [sum(r.priority is p for r in started) for p in Priority]

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None  # then the driver may be half way through a step
        if hasattr(self, "driver") and not has_failed:
            self.driver.run()


def crowded_machine(**changes: Any) -> type[SchedulerMachine]:
    """Return a machine whose rows soon compete for blocks, by the simplest rules but for `changes`."""
    fixed = {
        "enable_prefix_caching": False,
        "max_num_seqs": 6,
        "max_inflight_steps": 1,
        "policy": "priority",
        "watermark": 0.0,
        "admit_by_growth": False,
        "max_preemptions": 1,
        "scheduling_strategy": "continuous",
        "enable_seqs_governor": False,
    } | changes

    class CrowdedMachine(SchedulerMachine):
        @initialize(
            settings=SETTINGS.map(lambda settings: settings | fixed),
            pool=st.sampled_from([(24, 1), (32, 1), (16, 2)]),
            seed=st.integers(0, 99),
        )
        def start(self, settings: dict[str, Any], pool: tuple[int, int], seed: int) -> None:
            super().start(settings, pool, seed)

    return CrowdedMachine


def has_begun(request: Request) -> bool:
    """Return whether the request, or the leader of its group, has been scheduled."""
    first = request if request.leader is None else request.leader
    return first.first_scheduled_time is not None


def unchanged(after: EngineStats, before: EngineStats) -> bool:
    """Compare figures, except the counts of refusals."""
    counts = {"num_hopeless": 0, "num_rate_limited": 0, "tenants": {}, "loras": {}}
    return replace(after, **counts) == replace(before, **counts)
