"""Random life of a scheduler: arrivals, cancels, steps, faults, in tiny pools. Used by the default and the long run.

Output, sharing and the batch protocol are checked by `Driver` and `FakeRunner`; here are the rules and the promises
that concern more than one request.
"""

from __future__ import annotations

import random
import sys

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.fake_runner import VOCAB_SIZE
from support.scheduling import Driver, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import Busy, InternalError, InvalidRequest, NumericError
from tidewheel.request import FinishReason, Priority, Request, RequestState

MAX_WAITING_REQUESTS = 6
MAX_WAITING_TOKENS = 120

# Mostly pools of 24 to 64 slots: a few requests fill them, so that blocks run out and come back all the time.
POOLS = st.one_of(
    st.sampled_from([(24, 1), (32, 1), (16, 2), (24, 2), (8, 4), (12, 4), (4, 16)]),
    st.tuples(st.integers(4, 32), st.sampled_from([1, 2, 4, 16])),
)

SETTINGS = st.fixed_dictionaries(
    {
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "max_num_seqs": st.sampled_from([4, 6, 3, 2, 1]),
        "max_num_batched_tokens": st.one_of(st.sampled_from([8, 24]), st.integers(1, 24)),
        "max_inflight_steps": st.sampled_from([2, 1]),
        "policy": st.sampled_from(["priority", "fifo"]),
        "watermark": st.sampled_from([0.0, 0.25]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    driver: Driver

    @initialize(settings=SETTINGS, pool=POOLS, seed=st.integers(0, 99))
    def start(self, settings: dict[str, object], pool: tuple[int, int], seed: int) -> None:
        self.driver = Driver(
            num_blocks=pool[0],
            block_size=pool[1],
            max_waiting_requests=MAX_WAITING_REQUESTS,
            max_waiting_tokens=MAX_WAITING_TOKENS,
            **settings,
        )
        self.random = random.Random(seed)
        self.base = self.random.choices(range(10), k=30)
        self.num_requests = 0

    # --- what the scheduler's answers are checked against -----------------------------------------------------

    def order(self, request: Request) -> tuple[float, int]:
        """Requests are numbered as they arrive."""
        return (request.priority if self.driver.config.policy == "priority" else 0), int(request.request_id[1:])

    def having(self, *states: RequestState) -> list[Request]:
        return [request for request in self.driver.requests.values() if request.state in states]

    # --- rules ------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), priority=st.sampled_from(Priority))
    def add(self, count: int, priority: Priority) -> None:
        for _ in range(count):
            self.add_one(self.random_request(priority))

    def random_request(self, priority: Priority) -> Request:
        draw = self.random
        number, self.num_requests = self.num_requests, self.num_requests + 1
        shared = draw.choice([0, 4, 8, 16, 30])  # at times all of it: the whole prompt may then be in the cache
        prompt = [*self.base[:shared], *draw.choices(range(10), k=draw.randint(0 if shared else 1, 4))]
        max_tokens = draw.choice([1, 2, 8, 16, 24])
        self.driver.now += draw.choice([0.0, 1.0])
        return make_request(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            min_tokens=min(draw.choice([0, 0, 3, 8]), max_tokens),
            priority=priority,
            arrival_time=self.driver.now,
            stop_token_ids=tuple(draw.sample(range(VOCAB_SIZE), k=draw.randint(0, 3))),
            cache_salt=draw.choice(["", "", "x"]),
        )

    def add_one(self, request: Request) -> None:
        kv = self.driver.runner
        never_fits = request.max_num_tokens - 1 > kv.num_blocks * kv.block_size
        waiting = self.having(RequestState.WAITING)
        num_waiting_tokens = sum(r.num_tokens for r in waiting) + request.num_tokens
        is_full = len(waiting) >= MAX_WAITING_REQUESTS or num_waiting_tokens > MAX_WAITING_TOKENS
        before = self.driver.scheduler.stats()
        try:
            self.driver.add(request)
        except InvalidRequest:
            assert never_fits
        except Busy as error:
            assert is_full and not never_fits
            assert error.retry_after_ms is not None and error.retry_after_ms > 0
        else:
            assert not never_fits and not is_full
            return
        assert self.driver.scheduler.stats() == before

    @rule()
    def schedule(self) -> None:
        running = self.having(RequestState.RUNNING)
        could_run = self.driver.scheduler.has_unfinished and not self.driver.in_flight
        batch = self.driver.schedule()
        assert batch is not None or not could_run, "work is left, nothing is in flight and nothing is scheduled"
        self.check_victims(running)
        if batch is not None:
            self.check_order(batch)

    def check_victims(self, were_running: list[Request]) -> None:
        """Only the worst lose their blocks, never the best."""
        victims = [request for request in were_running if request.state is RequestState.PREEMPTED]
        stayed = [request for request in were_running if request.state is RequestState.RUNNING]
        if victims:
            assert stayed
            assert min(map(self.order, victims)) > max(map(self.order, stayed))

    def check_order(self, batch: ScheduledBatch) -> None:
        """Nobody enters while somebody who is served earlier waits; decodes are never left out for prompts."""
        entered = [self.driver.requests[new.request_id] for new in batch.new_rows]
        waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
        if entered and waiting:
            assert max(map(self.order, entered)) < min(map(self.order, waiting))
        if len(self.driver.in_flight) == 1:
            rows = self.driver.runner.rows
            for row_index in rows.keys() - batch.rows.tolist():
                assert len(rows[row_index].token_ids) - rows[row_index].num_computed_tokens > 1

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

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None  # then the driver may be half way through a step
        if hasattr(self, "driver") and not has_failed:
            self.driver.run()
