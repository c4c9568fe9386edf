"""Random life of a scheduler whose requests name adapters: loads end late or fail, and weights are dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, rule

from support.scheduler.scheduler_machine import POOLS, SETTINGS, SchedulerMachine
from support.scheduler.scheduler_model import follows
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import InvalidRequest
from tidewheel.lora import NO_SLOT, Lora
from tidewheel.request import Priority, Request, RequestState

NUM_ADAPTERS = 5


class LoraMachine(SchedulerMachine):
    """The machine's rules without its checks of order and budget, which adapters may change, and those of slots."""

    @initialize(settings=SETTINGS, pool=POOLS, seed=st.integers(0, 99), max_loras=st.integers(1, 3))
    def start(self, settings: dict[str, Any], pool: tuple[int, int], seed: int, max_loras: int = 1) -> None:
        super().start(settings | {"max_loras": max_loras}, pool, seed)
        self.max_loras = max_loras
        self.loras = [Lora(f"a{number}", number, Path()) for number in range(NUM_ADAPTERS)]
        self.loading: list[Lora] = []
        self.device: dict[int, Lora] = {}  # by slot, as the batches' loads say
        self.driver.scheduler.loras.load = self.load

    def load(self, lora: Lora) -> None:
        assert lora.weights is None and lora.error is None
        for other in self.loras:  # for room in host memory
            if other not in self.driver.scheduler.loras.running and self.random.random() < 0.3:
                other.weights = None
        if lora not in self.loading:
            self.loading.append(lora)

    def random_request(self, priority: Priority) -> Request:
        request = super().random_request(priority)
        number = self.random.randrange(NUM_ADAPTERS + 2)
        if number < NUM_ADAPTERS:
            request.lora = self.loras[number]
            request.cache_salt += f"/{request.lora.name}-{request.lora.version}"
        return request

    def twin(self, leader: Request) -> Request:
        twin = super().twin(leader)
        twin.lora = leader.lora
        return twin

    @rule(count=st.integers(1, NUM_ADAPTERS), fails=st.sampled_from([*[False] * 5, True]))
    def end_loads(self, count: int, fails: bool) -> None:
        for lora in self.loading[:count]:
            if fails:
                lora.error = InvalidRequest(f"{lora.name} is broken")
                self.loras[self.loras.index(lora)] = Lora(lora.name, lora.version + NUM_ADAPTERS, Path())
            else:
                lora.weights = lora.name
        del self.loading[:count]

    @rule(number=st.integers(0, NUM_ADAPTERS - 1))
    def drop_weights(self, number: int) -> None:
        if self.loras[number] not in self.driver.scheduler.loras.running:
            self.loras[number].weights = None

    @rule()
    def schedule(self) -> None:
        driver, now = self.driver, self.driver.now + 1.0
        late = [r.request_id for r in self.unfinished() if r.deadline is not None and r.deadline <= now]
        failed = [r.request_id for r in driver.scheduler.loras.failed_requests() if r.request_id not in late]
        in_time = [r for r in self.unfinished() if r.request_id not in (*late, *failed)]
        if len(driver.in_flight) < driver.config.max_inflight_steps:
            self.model.pass_time(in_time, driver.prefilling(), now)
        num_preemptions = {r.request_id: r.num_preemptions for r in in_time}
        followers = [request for request in in_time if follows(request)]
        is_idle, ending = not driver.in_flight, driver.ending()
        batch = driver.schedule()
        self.note_releases(followers, now)
        assert {r.request_id for r in driver.expired} >= {*late, *failed}
        self.num_expired += len(late)
        self.follow_quotas(now)
        victims = [r for r in in_time if r.num_preemptions > num_preemptions[r.request_id]]
        assert not ending & {request.request_id for request in victims}, "a row left that had all its tokens"
        for request in victims:
            self.model.preempt(request, now)
        if batch is not None:
            self.check_slots(batch)
        elif is_idle and driver.config.scheduling_strategy == "continuous":
            # A drained slot is held for the request that reserved it, which may have to load its adapter again.
            able = [r for r in self.waiting() if r.lora is None or r.lora.weights is not None]
            assert not able or any(r.lora is not None and r.lora.weights is None for r in self.waiting())

    def check_slots(self, batch: ScheduledBatch) -> None:
        """Follow the loads of the step, and check that each of its rows computes with its adapter."""
        assert len({load.slot for load in batch.lora_loads}) == len(batch.lora_loads)
        for slot, lora in batch.lora_loads:
            assert 0 <= slot < self.max_loras and lora.weights is not None
            self.device[slot] = lora
        contents = dict(self.driver.scheduler.loras.contents)  # a slot that was emptied keeps its old matrices
        assert len(set(contents.values())) == len(contents), "an adapter takes two slots"
        slots = batch.lora_slots.tolist() or [NO_SLOT] * len(batch.rows)
        for row, slot in zip(batch.rows.tolist(), slots, strict=True):
            request = self.driver.scheduler._state.columns.request(row)
            assert self.device.get(slot) is request.lora, f"{request} computes with {self.device.get(slot)}"

    @invariant()
    def keeps_slots(self) -> None:
        if not hasattr(self, "device"):
            return
        scheduler = self.driver.scheduler
        running = {r.lora for r in self.having(RequestState.RUNNING) if r.lora is not None}
        assert scheduler.loras.running == running and len(running) <= self.max_loras
        for slot, lora in scheduler.loras.contents:
            assert self.device[slot] is lora
        stats = scheduler.stats()
        assert sum(figures.num_running for figures in stats.loras.values()) == sum(
            r.lora is not None for r in self.having(RequestState.RUNNING)
        )
        waiting = self.having(RequestState.WAITING, RequestState.PREEMPTED)
        num_waiting = sum(figures.num_waiting for figures in stats.loras.values())
        assert num_waiting == sum(r.lora is not None for r in waiting)

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.driver.scheduler.loras.load = lambda lora: setattr(lora, "weights", lora.name)
            for lora in (*self.loras, *self.driver.scheduler.loras.waiting):
                lora.weights = lora.name  # from now on each step has something to do
        super().teardown()
