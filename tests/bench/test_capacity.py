"""The search for a capacity, against targets that are formulas: no server, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bench.runs import outcome
from tidewheel.bench.capacity import (
    FIRST_LOOK,
    GOAL,
    HIGHEST_RATE,
    LOWEST_SHARE,
    RESOLUTION,
    STREAM,
    WHOLE_ANSWER,
    CapacityBracket,
    CapacitySearch,
    LoadPoint,
    PointWatch,
    RateSearch,
    Verdict,
    verdict_of,
)
from tidewheel.bench.outcome import UNANSWERED, RequestOutcome, Slo

SLO = Slo(1.0, 0.1)
Attainment = Callable[[float], float]  # share of requests in time, over the rate


def search(verdict: Callable[[float], Verdict], start: float, limit: int = 60) -> tuple[CapacityBracket, list[float]]:
    """Return what a search finds, and the rates that it asked for."""
    one, rates = RateSearch(start), []
    while (rate := one.next_rate()) is not None:
        rates.append(rate)
        one.note(rate, verdict(rate))
        assert len(rates) <= limit
    return one.capacity, rates


def step(capacity: float) -> Callable[[float], Verdict]:
    return lambda rate: Verdict.MET if rate <= capacity else Verdict.MISSED


def sampled(attainment: Attainment, seed: int, most: int = 320) -> Callable[[float], Verdict]:
    """Judge requests that are in time by chance, looking at 20, 40, … of them as a point does."""
    rng = random.Random(seed)

    def verdict(rate: float) -> Verdict:
        share, num_met, count, look = attainment(rate), 0, 0, FIRST_LOOK
        while True:
            num_met += sum(rng.random() < share for _ in range(look - count))
            count, found = look, verdict_of(num_met, look)
            if found is not Verdict.UNDECIDED or look >= most:
                return found
            look *= 2

    return verdict


def md1(served_per_s: float, bound_s: float) -> Attainment:
    """Waits of a queue with Poisson arrivals and fixed service, their tail approximated by an exponential."""

    def attainment(rate: float) -> float:
        load = rate / served_per_s
        if load >= 1.0:
            return 0.0
        mean_wait = load / (2 * served_per_s * (1 - load))
        return 1.0 - load * math.exp(-max(0.0, bound_s - 1 / served_per_s) * load / mean_wait)

    return attainment


def rate_at_goal(attainment: Attainment, high: float) -> float:
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment(middle) >= GOAL else (low, middle)
    return low


@given(st.floats(0.05, HIGHEST_RATE * 0.99), st.floats(0.05, 100.0))
def test_a_bracket_holds_the_true_capacity_within_ten_percent(true: float, start: float) -> None:
    capacity, rates = search(step(true), start)
    if true < 2 * start * LOWEST_SHARE:
        assert capacity.low == 0.0 or capacity.low <= true < capacity.high
        return
    assert capacity.low <= true < capacity.high <= RESOLUTION * capacity.low
    assert capacity.low <= capacity.per_s <= capacity.high
    assert not capacity.note
    assert len(rates) == len(set(rates))


def test_doubling_then_bisection_takes_few_points() -> None:
    _, rates = search(step(5.0), start=4.0)
    assert rates[:3] == pytest.approx([4.0, 8.0, math.sqrt(32.0)])
    assert len(rates) == 5


@pytest.mark.parametrize(("served_per_s", "bound_s"), [(5.0, 1.0), (50.0, 0.2), (20.0, 2.0)])
def test_the_bracket_of_a_noisy_queue_holds_its_capacity(served_per_s: float, bound_s: float) -> None:
    attainment = md1(served_per_s, bound_s)
    true = rate_at_goal(attainment, served_per_s)
    found = [search(sampled(attainment, seed), served_per_s / 3)[0] for seed in range(100)]
    assert sum(capacity.low <= true <= capacity.high for capacity in found) >= 90  # of intervals of 95 %
    assert all(abs(math.log(capacity.per_s / true)) < math.log(1.3) for capacity in found)


@settings(max_examples=50)
@given(st.floats(1.0, 50.0), st.floats(1.01, 2.0), st.floats(0.5, 12.0))
def test_undecided_rates_lie_inside_the_bracket_and_its_ends_close_in_on_them(
    low: float, width: float, start: float
) -> None:
    def fuzzy(rate: float) -> Verdict:
        return Verdict.MET if rate <= low else Verdict.MISSED if rate > low * width else Verdict.UNDECIDED

    capacity, _ = search(fuzzy, start)
    rates = [capacity.low, *capacity.undecided, capacity.high]
    assert capacity.low <= low
    assert low * width < capacity.high
    assert rates == sorted(rates)
    assert rates[1] <= RESOLUTION * rates[0]
    assert rates[-1] <= RESOLUTION * rates[-2]
    assert ("undecided at" in capacity.note) == bool(capacity.undecided)


def test_a_target_that_never_meets_the_objective_has_no_capacity() -> None:
    capacity, rates = search(lambda rate: Verdict.MISSED, 8.0)
    assert capacity.per_s == capacity.low == 0.0
    assert capacity.high == min(rates) >= 8.0 * LOWEST_SHARE
    assert capacity.note == "no rate met the objective, down to 0.5/s"


def test_a_target_that_always_meets_it_is_bounded_by_what_the_client_can_offer() -> None:
    capacity, rates = search(lambda rate: Verdict.MET, 8.0)
    assert capacity.per_s == capacity.low == max(rates) == HIGHEST_RATE
    assert math.isinf(capacity.high)
    assert capacity.note == "no rate missed the objective, up to 400/s"


def test_a_target_that_is_never_clear_ends_the_search_too() -> None:
    capacity, rates = search(lambda rate: Verdict.UNDECIDED, 8.0)
    assert (capacity.low, capacity.high) == (0.0, math.inf)
    assert len(capacity.undecided) == len(rates)
    assert "undecided at 0.5, " in capacity.note


def test_verdicts_follow_the_interval() -> None:
    assert verdict_of(35, 35) is Verdict.MET
    assert verdict_of(34, 34) is Verdict.UNDECIDED
    assert verdict_of(14, 20) is Verdict.MISSED
    assert verdict_of(18, 20) is Verdict.UNDECIDED
    assert verdict_of(0, 0) is Verdict.UNDECIDED


def test_a_search_that_ran_out_of_time_says_so() -> None:
    assert CapacityBracket(4.0, 8.0).note == "not narrowed further: out of time"
    assert CapacityBracket(4.0, 8.0, (4.2,)).note == "not narrowed further: out of time; undecided at 4.2/s"
    assert CapacityBracket(4.0, 4.3).note == ""


def test_ratios_of_brackets() -> None:
    ratio, is_bound = CapacityBracket(16.0, 25.0).over(CapacityBracket(4.0, 5.0))
    assert ratio.mean == pytest.approx(20.0 / math.sqrt(20.0))
    assert (ratio.low, ratio.high) == pytest.approx((16 / 5, 25 / 4))
    assert not is_bound
    assert CapacityBracket(0.0, 1.0).over(CapacityBracket(4.0, 4.0))[0].mean == 0.0
    assert math.isnan(CapacityBracket(4.0, 5.0).over(CapacityBracket(400.0, math.inf))[0].mean)
    assert math.isnan(CapacityBracket(0.0, 0.5).over(CapacityBracket(0.0, 1.0))[0].mean)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [
        (CapacityBracket(4.0, 4.0), CapacityBracket(0.0, 0.5), 8.0),
        (CapacityBracket(400.0, math.inf), CapacityBracket(4.0, 4.0), 100.0),
    ],
)
def test_a_ratio_to_nothing_or_of_no_end_is_a_lower_bound(
    ours: CapacityBracket, theirs: CapacityBracket, ratio: float
) -> None:
    found, is_bound = ours.over(theirs)
    assert is_bound
    assert found.mean == pytest.approx(ratio)
    assert math.isnan(found.high)


def queue(rate: float, served_per_s: float, *, streamed: bool) -> list[RequestOutcome]:
    """Outcomes at a rate; a stream's first token is late from half of the rate that is served."""
    whole = 0.5 if rate <= served_per_s else 9.0
    first = 0.5 if rate <= served_per_s / 2 else 1.2
    if streamed:
        return [outcome(ttft=first if whole < 1 else 9.0, tpot=0.0) for _ in range(40)]
    return [outcome(ttft=whole, tpot=0.0, streamed=False) for _ in range(40)]


@pytest.mark.parametrize("streamed", [True, False])
def test_both_objectives_are_searched_on_the_same_points_and_only_streams_have_the_second(streamed: bool) -> None:
    one, points = CapacitySearch(SLO, start=8.0), list[LoadPoint]()
    while (point := one.next_point()) is not None:
        points.append(point)
        one.note(point, queue(point.rate, 10.0, streamed=streamed))
    found = one.capacities()
    assert found[WHOLE_ANSWER].low <= 10.0 < found[WHOLE_ANSWER].high
    assert len({point.rate for point in points}) == len(points)
    assert (STREAM in found) == streamed
    if streamed:
        assert found[STREAM].low <= 5.0 < found[STREAM].high
        assert len(points) <= 9  # 5 of the first, 4 more


def test_a_target_of_which_nothing_was_measured_has_no_bracket() -> None:
    assert CapacitySearch(SLO, start=8.0).capacities() == {}


def waiting(sent: float) -> RequestOutcome:
    one = outcome(sent=sent, tokens=11)
    one.ended = one.first_token = one.last_token = None
    one.num_tokens = 0
    return one


def test_a_point_is_long_enough_when_it_is_clear() -> None:
    good = [outcome(sent=0.1 * index) for index in range(80)]
    watch = PointWatch(SLO, WHOLE_ANSWER, least_s=5.0)
    assert not watch.is_enough(good[:45], 4.9)  # clear, and too short
    assert watch.is_enough(good[:45], 5.0)


def test_a_point_that_is_not_clear_is_looked_at_again_when_its_count_has_doubled() -> None:
    mixed = [outcome(sent=0.1 * i, ttft=0.1 if i % 10 else 9.0) for i in range(20)]
    late = [outcome(sent=4.0, ttft=9.0) for _ in range(20)]
    watch = PointWatch(SLO, WHOLE_ANSWER, least_s=1.0)
    assert not watch.is_enough(mixed, 20.0)
    assert not watch.is_enough([*mixed, *late[:19]], 20.0)  # clear by now, and not looked at
    assert watch.is_enough([*mixed, *late], 20.0)


def test_a_hopeless_point_is_clear_after_a_few_requests() -> None:
    late = [outcome(ttft=9.0) for _ in range(20)]
    watch = PointWatch(SLO, STREAM, 1.0)
    assert not watch.is_enough(late[:19], 20.0)
    assert watch.is_enough(late, 20.0)
    assert watch.verdict is Verdict.MISSED
    assert not PointWatch(SLO, STREAM, 1.0).is_enough([outcome()] * 20, 20.0)


def test_what_a_watch_has_seen_stands_when_the_requests_under_way_turn_out_otherwise() -> None:
    outcomes = [outcome(ttft=9.0) for _ in range(6)] + [outcome() for _ in range(40)]
    for seen, expected in ((None, Verdict.UNDECIDED), (Verdict.MISSED, Verdict.MISSED)):
        one = CapacitySearch(SLO, start=8.0)
        assert one.note(LoadPoint(8.0, WHOLE_ANSWER), outcomes, seen) is expected
        assert (one.capacities()[WHOLE_ANSWER].high == 8.0) == (seen is not None)


def test_requests_under_way_are_judged_once_they_are_too_late_and_not_out_of_turn() -> None:
    stuck = [waiting(0.0) for _ in range(30)]
    done = [outcome(sent=0.0) for _ in range(40)]
    assert not PointWatch(SLO, WHOLE_ANSWER, 0.1).is_enough([*stuck, *done], 1.9)  # 1 + 10 * 0.1 s are their limit
    assert PointWatch(SLO, WHOLE_ANSWER, 0.1).is_enough([*stuck, *done], 2.1)


def test_open_requests_are_awaited_unless_the_rate_is_missed_or_they_are_too_late() -> None:
    stuck = [waiting(0.0) for _ in range(40)]
    met, missed, open_one = (
        PointWatch(SLO, WHOLE_ANSWER, 0.1),
        PointWatch(SLO, WHOLE_ANSWER, 0.1),
        [outcome(), waiting(0.0)],
    )
    assert met.is_enough([outcome()] * 40, 1.0)
    assert not met.is_settled(open_one, 1.9)  # 1 + 10 * 0.1 s are the limit
    assert met.is_settled(open_one, 2.1)
    assert missed.is_enough(stuck, 2.1)
    assert missed.is_settled(open_one, 1.9)


def test_a_request_that_was_cancelled_in_time_speaks_for_no_objective() -> None:
    cut = [waiting(0.0) for _ in range(60)]
    for one in cut:
        one.error, one.code, one.ended = "the run was cut short", UNANSWERED, 1.9
    search = CapacitySearch(SLO, start=8.0)
    search.note(LoadPoint(8.0, WHOLE_ANSWER), [*[outcome(ttft=9.0)] * 10, *[outcome()] * 400, *cut], Verdict.MISSED)
    assert search.capacities()[STREAM].low == 8.0
    for one in cut:
        one.ended = 2.1  # past their bound
    search = CapacitySearch(SLO, start=8.0)
    search.note(LoadPoint(8.0, WHOLE_ANSWER), [*[outcome()] * 400, *cut], Verdict.MISSED)
    assert search.capacities()[STREAM].high == 8.0
