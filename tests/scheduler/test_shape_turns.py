"""Models that take many steps: a step has rows of one shape, shapes share the time, CRITICAL requests go first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_request, make_scheduler
from tidewheel.batch import SampledTokens
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.step_plan import MAX_URGENT, ShapeTurns, Turn

NUM_ROWS = 3
SECONDS = {"8x8": 1.0, "16x16": 1.0, "32x32": 1.0}


@dataclass
class Engine:
    """A scheduler on a clock that steps move, with the requests of each step."""

    changes: dict[str, object] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: SECONDS)
    now: float = 0.0
    steps: list[list[Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        defaults = {"enable_prefix_caching": False, "takes_turns": True, "max_num_seqs": NUM_ROWS}
        self.scheduler = make_scheduler(num_blocks=64, block_size=65, **defaults | self.changes)

    def add(self, name: str, shape: str, steps: int, priority: Priority = Priority.NORMAL) -> Request:
        request = make_request(name, 1, bucket=shape, max_tokens=steps, priority=priority, arrival_time=self.now)
        self.scheduler.add_group([request], self.now)
        return request

    def step(self, slice_s: float | None = None) -> list[Request]:
        batch = self.scheduler.schedule(self.now, slice_s)
        assert batch is not None and set(batch.num_scheduled_tokens.tolist()) == {1}
        columns = self.scheduler._state.columns
        requests = [columns.request(row) for row in batch.rows.tolist()]
        assert len({request.bucket for request in requests}) == 1
        self.now += self.seconds[requests[0].bucket]
        tokens = SampledTokens(batch.step_id, np.zeros(len(requests), np.int32))
        self.scheduler.apply(batch, tokens, self.now)
        check_invariants(self.scheduler)
        self.steps.append(requests)
        return requests

    def run(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()

    def counts(self) -> Counter[str]:
        return Counter(request.request_id for step in self.steps for request in step)


@given(st.integers(2, 5), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_between_two_steps_of_a_shape_each_other_takes_a_longest_step_and_one_of_its_own(
    num_shapes: int, data: st.DataObject
) -> None:
    shapes = [str(shape) for shape in range(num_shapes)]
    costs = data.draw(st.lists(st.floats(0.1, 10.0), min_size=num_shapes, max_size=num_shapes))
    turns, used = ShapeTurns(), {shape: dict.fromkeys(shapes, 0.0) for shape in shapes}
    for _ in range(200):
        turn = turns.choose([Turn(shape, is_urgent=False) for shape in shapes])
        shape, seconds = turn.shape, costs[int(turn.shape)]
        turns.pay(turn, 1, seconds)
        used[shape] = dict.fromkeys(shapes, 0.0)
        for others in used.values():
            others[shape] += seconds
        for own, others in used.items():
            assert all(total <= max(costs) + costs[int(other)] for other, total in others.items() if other != own)


def test_shapes_share_the_time_whatever_their_steps_cost() -> None:
    engine = Engine(seconds={"8x8": 1.0, "64x64": 5.0}, changes={"max_num_seqs": 2})
    small, large = (engine.add(shape, shape, 60) for shape in ("8x8", "64x64"))
    for _ in range(36):
        engine.step()
    assert abs(engine.counts()[small.request_id] - 5 * engine.counts()[large.request_id]) <= 10


arrivals = st.lists(
    st.tuples(st.sampled_from(sorted(SECONDS)), st.integers(1, 20), st.sampled_from(Priority), st.integers(0, 9)),
    min_size=1,
    max_size=16,
)


@given(arrivals, st.sets(st.integers(0, 60), max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_request_has_its_steps_and_no_row_waits_longer_than_the_bound(
    asked: list[tuple[str, int, Priority, int]], cancels: set[int]
) -> None:
    """The bound: of each shape one step, each after at most `MAX_URGENT` steps of CRITICAL requests."""
    engine, pending = Engine(), sorted(enumerate(asked), key=lambda pair: pair[1][3])
    requests: list[Request] = []
    last: dict[str, tuple[int, int]] = {}  # step and preemptions at a request's last step
    number = 0
    while pending or engine.scheduler.has_unfinished:
        while pending and pending[0][1][3] <= number:
            index, (shape, steps, priority, _) = pending.pop(0)
            requests.append(engine.add(str(index), shape, steps, priority))
        if number in cancels and requests:
            engine.scheduler.cancel(requests[number % len(requests)].request_id)
        for request in engine.step() if engine.scheduler.has_unfinished else ():
            before, preemptions = last.get(request.request_id, (number, 0))
            assert number - before <= (MAX_URGENT + 1) * len(SECONDS) or preemptions < request.num_preemptions
            last[request.request_id] = number, request.num_preemptions
        number += 1
    counts = engine.counts()
    ended = [request for request in requests if request.finish_reason is FinishReason.LENGTH]
    assert all(counts[request.request_id] == request.max_tokens for request in ended)
    assert len(ended) >= len(asked) - len(cancels)


def test_a_critical_request_takes_a_row_and_nearly_all_steps_and_the_victim_goes_on_where_it_was() -> None:
    engine = Engine()
    flood = [engine.add(f"low{index}", shape, 40, Priority.LOW) for index, shape in enumerate(sorted(SECONDS) * 4)]
    for _ in range(6):
        engine.step()
    urgent = engine.add("urgent", "8x8", 30, Priority.CRITICAL)
    while not urgent.is_finished:
        engine.step()
    with_it = engine.steps[6:]
    assert len(with_it) <= 30 + 30 // MAX_URGENT + 1
    assert sum(len(step) == 1 and step[0] is urgent for step in with_it) >= 28
    assert any(urgent not in step for step in with_it)  # others do not stand still
    engine.run()
    assert sum(request.num_preemptions for request in flood) == 1
    assert {engine.counts()[request.request_id] for request in flood} == {40}


def test_requests_of_other_shapes_do_not_take_the_row_of_the_first_in_line() -> None:
    engine = Engine(changes={"max_num_seqs": 2})
    engine.add("a", "8x8", 2)
    engine.add("b", "8x8", 9)
    first = engine.add("c", "16x16", 3)
    for index in range(20):
        engine.add(f"later{index}", "8x8", 2)
    while not first.is_finished:
        engine.step()
    assert len(engine.steps) <= 9


def test_a_slice_computes_the_rows_that_waited_longest() -> None:
    engine = Engine()
    for index in range(3):
        engine.add(str(index), "8x8", 12)
    engine.step()
    for _ in range(3):
        assert len(engine.step(slice_s=0.4)) == 1
    assert engine.counts() == Counter({"0": 2, "1": 2, "2": 2})


def test_without_classes_nobody_is_urgent() -> None:
    engine = Engine(changes={"policy": "fifo"})
    for index, shape in enumerate(["8x8", "8x8", "16x16"]):
        engine.add(str(index), shape, 4, Priority.CRITICAL if index else Priority.LOW)
    engine.run()
    assert [step[0].bucket for step in engine.steps] == ["8x8", "16x16"] * 4
