"""Capacity: the highest rate of Poisson arrivals at which enough requests meet an objective.

As in DistServe (arXiv 2401.09670) and Sarathi-Serve (arXiv 2403.02310), by doubling or halving the rate, then
bisection; a confidence interval decides each rate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple

from tidewheel.bench.estimates import UNKNOWN, Estimate, wilson_interval
from tidewheel.bench.outcome import UNANSWERED, RequestOutcome, Slo

GOAL = 0.9  # share of requests
RESOLUTION = 1.1  # ratio of the ends of a finished bracket
HIGHEST_RATE = 400.0
LOWEST_SHARE = 1 / 16
FIRST_LOOK = 20  # requests
FEWEST_REQUESTS = 60  # of an unclear point; 59 good ones suffice

Objective = Callable[[Slo, RequestOutcome], bool]
WHOLE_ANSWER, STREAM = "whole answer", "stream"
OBJECTIVES: Mapping[str, Objective] = {WHOLE_ANSWER: Slo.is_met_at_end, STREAM: Slo.is_met}


class Verdict(StrEnum):
    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"


def verdict_of(num_met: int, count: int) -> Verdict:
    low, high = wilson_interval(num_met, count)
    if low >= GOAL:
        return Verdict.MET
    return Verdict.MISSED if high < GOAL else Verdict.UNDECIDED


class CapacityBracket(NamedTuple):
    low: float  # 0: none
    high: float  # inf: none
    undecided: tuple[float, ...] = ()  # between both, ascending

    @property
    def per_s(self) -> float:
        return math.sqrt(self.low * self.high) if math.isfinite(self.high) else self.low

    @property
    def note(self) -> str:
        tried = (self.low, *self.undecided, self.high)
        notes = [
            (not self.low, f"no rate met the objective, down to {tried[1]:.3g}/s"),
            (math.isinf(self.high), f"no rate missed the objective, up to {tried[-2]:.3g}/s"),
            (self._is_wide(tried), "not narrowed further: out of time"),
            (bool(self.undecided), f"undecided at {', '.join(f'{rate:.3g}' for rate in self.undecided)}/s"),
        ]
        return "; ".join(text for is_so, text in notes if is_so)

    def _is_wide(self, tried: Sequence[float]) -> bool:
        ends = (tried[:2], tried[-2:])
        return bool(self.low) and any(1.001 * RESOLUTION * low < high < math.inf for low, high in ends)

    def over(self, other: "CapacityBracket") -> tuple[Estimate, bool]:
        """Return the ratio of two capacities, with its worst and best case, and whether it is only a lower bound."""
        is_bound = not other.low or math.isinf(self.high)
        theirs = other.per_s or other.high
        if math.isinf(other.high) or not (self.low or other.low):
            return UNKNOWN, False
        low = self.low / other.high
        high = math.nan if is_bound else self.high / other.low
        return Estimate(self.per_s / theirs, low, high), is_bound

    def summary(self) -> dict[str, Any]:
        return {"per_s": self.per_s, "bracket": [self.low, self.high], "undecided": self.undecided, "note": self.note}


UNTRIED = CapacityBracket(0.0, math.inf)


@dataclass(slots=True)
class RateSearch:
    start: float
    highest: float = HIGHEST_RATE
    capacity: CapacityBracket = UNTRIED

    def next_rate(self) -> float | None:
        if math.isinf(self.capacity.high) and (rate := self._above()) is not None:
            return rate
        return self._between() if self.capacity.low else self._below()

    def _above(self) -> float | None:
        highest = max((self.capacity.low, *self.capacity.undecided))
        rate = min(2.0 * highest or self.start, self.highest)
        return rate if rate > highest else None

    def _below(self) -> float | None:
        rate = min((self.capacity.high, *self.capacity.undecided)) / 2.0
        return rate if rate >= self.start * LOWEST_SHARE else None

    def _between(self) -> float | None:
        rates = [self.capacity.low, *self.capacity.undecided, self.capacity.high]
        ends = [(low, high) for low, high in (rates[:2], rates[-2:]) if math.isfinite(high)]
        low, high = max(ends, key=lambda pair: pair[1] / pair[0], default=(1.0, 1.0))
        return math.sqrt(low * high) if high > RESOLUTION * low else None

    def note(self, rate: float, verdict: Verdict) -> None:
        low, high, undecided = self.capacity
        if not low < rate < high:
            return
        if verdict is Verdict.MET:
            low = rate
        elif verdict is Verdict.MISSED:
            high = rate
        rates = sorted({*undecided, rate})
        self.capacity = CapacityBracket(low, high, tuple(one for one in rates if low < one < high))


class LoadPoint(NamedTuple):
    rate: float
    objective: str


class CapacitySearch:
    def __init__(self, slo: Slo, start: float) -> None:
        self._slo = slo
        self._searches = {name: RateSearch(start) for name in OBJECTIVES}

    def next_point(self) -> LoadPoint | None:
        for name, search in self._searches.items():
            if (rate := search.next_rate()) is not None:
                return LoadPoint(rate, name)
        return None

    def note(self, point: LoadPoint, outcomes: Sequence[RequestOutcome], seen: Verdict | None = None) -> Verdict:
        """Record the outcomes of a run at one rate. Return the run's verdict: `seen`, if given."""
        if outcomes and not any(outcome.streamed for outcome in outcomes):
            self._searches.pop(STREAM, None)
        outcomes = [outcome for outcome in outcomes if not self._was_cut_short(outcome)]
        verdicts = {}
        for name, search in self._searches.items():
            num_met = sum(OBJECTIVES[name](self._slo, outcome) for outcome in outcomes)
            verdicts[name] = (seen if name == point.objective else None) or verdict_of(num_met, len(outcomes))
            if name == point.objective or verdicts[name] is not Verdict.UNDECIDED:
                search.note(point.rate, verdicts[name])
        return verdicts.get(point.objective, Verdict.UNDECIDED)

    def _was_cut_short(self, outcome: RequestOutcome) -> bool:
        limit = self._slo.whole_answer_s(outcome.offered.num_output_tokens)
        return outcome.code == UNANSWERED and outcome.ended is not None and outcome.ended <= limit

    def capacities(self) -> dict[str, CapacityBracket]:
        found = {name: search.capacity for name, search in self._searches.items()}
        return {name: one for name, one in found.items() if one != UNTRIED}


class PointWatch:
    def __init__(self, slo: Slo, objective: str, least_s: float) -> None:
        self._slo = slo
        self._is_met = OBJECTIVES[objective]
        self._least_s = least_s
        self._next_look = FIRST_LOOK
        self.verdict: Verdict | None = None

    def is_enough(self, outcomes: Sequence[RequestOutcome], now: float) -> bool:
        if now < self._least_s or len(outcomes) < self._next_look:
            return False
        judged = list(takewhile(lambda outcome: self._is_settled(outcome, now), outcomes))
        if len(judged) < self._next_look:
            return False
        self._next_look = 2 * len(judged)
        num_met = sum(self._is_met(self._slo, outcome) for outcome in judged)
        verdict = verdict_of(num_met, len(judged))
        self.verdict = None if verdict is Verdict.UNDECIDED else verdict
        return self.verdict is not None

    def is_settled(self, outcomes: Sequence[RequestOutcome], now: float) -> bool:
        """Return whether the verdict is final: `MISSED`, or all requests ended or too late."""
        return self.verdict is Verdict.MISSED or all(self._is_settled(outcome, now) for outcome in outcomes)

    def _is_settled(self, outcome: RequestOutcome, now: float) -> bool:
        limit = self._slo.whole_answer_s(outcome.offered.num_output_tokens)
        return outcome.ended is not None or now - outcome.sent > limit
