"""Number of drafts of each row in a step, by goodput: the expected tokens per second.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (arXiv 2406.14066).
No fixed number serves all batches: at the same acceptance, vLLM gained 67 % at batch 1 and lost 18 % at batch 32
(vllm-project/vllm#26504).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Int32Array, RowArray

NUM_KINDS = 9  # of proposals
MARGIN = 0.03  # least gain of drafts: it covers errors of the estimates
SLACK_TOKENS = 1.0  # that drafts may cost a request
SLACK = 0.02  # the same in proportion to its tokens
CREDIT = 1.0  # most tokens that a request's own drafts count before they are tested
WAIT_CREDIT = 3.0  # the same, in waits

_PRIOR_RATE = 0.5  # acceptance of a kind before any test
_PRIOR_TESTS = 8.0  # weight of that rate
_KIND_FORGET = 0.999  # per test
_ROW_FORGET = 0.9  # per test
_EXPECTED_FAILURES = 2.0  # that a row's own tests must exceed in number to outweigh its kind
_LEAST_FAILURE = 0.005

_UNMEASURED = (1, 0.01), (8, 0.0135), (64, 0.04)  # entries and seconds of steps, before any was measured
_NOISE = 0.01  # variance of a step's log seconds, as the variances below
_FIRST_VARIANCES = 0.09, 0.02, 0.09, 0.0025  # of pace, overhead, wait and depth
_DRIFTS = 9e-4, 1e-5, 4e-5, 2e-6  # of these, per step: other programs come and go
_MOST_SURPRISE = 3.0  # standard deviations that a step counts as at most: one pause does not mislead
_JUMP = 0.06  # variance of the pace after such a step
_MOST_OFF = 1.25  # factor from a step's estimate to the seconds that its rows pay

_TRIAL_PERIOD = 32  # steps without drafts before a trial
_MOST_PERIOD = 512  # the same after trials in vain, each of which doubles it
_TRIAL_RATIO = 1.05  # most seconds of a trial by those of the smallest

_Floats = npt.NDArray[np.float64]


class DecodeStep(NamedTuple):
    """Size of a step of decodes."""

    num_rows: int
    num_drafts: int = 0
    most_drafts: int = 0  # of a row
    has_waited: bool = False  # for tokens that drafts may follow, where other steps are launched ahead


class DecodeCost:
    """Estimate of a decode step's seconds.

    ``log seconds ≈ size(entries) + pace + [has drafts] · overhead + [has waited] · wait + log2(1 + most drafts) ·
    depth``, where `size` is what was measured at load, interpolated, and in proportion beyond the largest. A Kalman
    filter (1960) that takes the other terms for independent follows them. Steps without drafts show the pace too, so
    a busy neighbour is not taken for the cost of drafts.
    """

    def __init__(self, max_entries: int, step_seconds: Sequence[tuple[int, float]] = ()) -> None:
        self._log2 = np.log2(np.arange(1, max_entries + 1))
        sizes, seconds = np.array(step_seconds or _UNMEASURED).T
        self._sizes = np.interp(self._log2, np.log2(sizes), np.log(seconds))  # log seconds by entries - 1
        self._sizes += math.log(2.0) * np.maximum(self._log2 - math.log2(sizes[-1]), 0.0)
        self._terms = [0.0] * len(_DRIFTS)  # pace, overhead, wait, depth
        self._variances = list(_FIRST_VARIANCES)

    @property
    def wait(self) -> float:
        """Return what a step takes longer for having waited, in steps launched ahead."""
        return max(math.exp(self._terms[2]) - 1.0, 0.0)

    def observe(self, step: DecodeStep, seconds: float) -> None:
        factors = 1.0, float(step.num_drafts > 0), float(step.has_waited), float(self._log2[step.most_drafts])
        variance = _NOISE + sum([factor * factor * own for factor, own in zip(factors, self._variances, strict=True)])
        expected = self._sizes[step.num_rows + step.num_drafts - 1] + sum(map(mul, self._terms, factors))
        surprise, most = math.log(seconds) - expected, _MOST_SURPRISE * math.sqrt(variance)
        if abs(surprise) > most:
            surprise = math.copysign(most, surprise)
            self._variances[0] += _JUMP
            variance += _JUMP
        for index, (factor, drift) in enumerate(zip(factors, _DRIFTS, strict=True)):
            share = factor * self._variances[index]
            self._terms[index] += share * surprise / variance
            self._variances[index] += drift - share * share / variance

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of a step without drafts."""
        return math.exp(self._sizes[num_rows - 1] + self._terms[0])

    def ratios(self, num_rows: int, num_drafts: Int32Array, most_drafts: Int32Array | int) -> _Floats:
        """Return the seconds of waiting steps of `num_drafts` [n], `most_drafts` of a row, by those of plain ones."""
        _, overhead, wait, depth = self._terms
        sizes = self._sizes.take(num_drafts + (num_rows - 1)) + (wait - self._sizes[num_rows - 1])
        sizes += overhead * (num_drafts > 0) + max(depth, 0.0) * self._log2.take(most_drafts)
        ratios: _Floats = np.maximum(np.exp(sizes), 1.0)
        return ratios


class AcceptanceRates:
    """Estimate of the probability that a draft is accepted, if all before it are.

    Each kind of proposals has a rate of failure, and each row a factor on it: its failures in about ten tests, by
    those that the kinds let expect. So a row whose short matches fail may still draft after a long one.
    """

    def __init__(self, num_rows: int) -> None:
        self._tests = np.full(NUM_KINDS, _PRIOR_TESTS)
        self._fails = self._tests * (1.0 - _PRIOR_RATE)
        self._failures = self._fails / self._tests  # rates
        self._failed, self._expected = np.zeros((2, num_rows))  # tests of rows
        self._factors = np.ones(num_rows)

    def enter(self, row: int) -> None:
        self._failed[row], self._expected[row], self._factors[row] = 0.0, 0.0, 1.0

    def rates(self, rows: RowArray, kinds: Int32Array) -> _Floats:
        rates: _Floats = np.maximum(1.0 - self._failures.take(kinds) * self._factors.take(rows), 0.0)
        return rates

    def observe(self, rows: RowArray, kinds: Int32Array, num_tested: Int32Array, num_accepted: Int32Array) -> None:
        num_failed = num_tested - num_accepted  # 0 or 1, the last test
        keep = _ROW_FORGET**num_tested
        now = (1.0 - keep) / (1.0 - _ROW_FORGET) * self._failures.take(kinds)
        self._failed[rows] = failed = self._failed.take(rows) * keep + num_failed
        self._expected[rows] = expected = self._expected.take(rows) * keep + now
        self._factors[rows] = (failed + _EXPECTED_FAILURES) / (expected + _EXPECTED_FAILURES)
        tests = np.bincount(kinds, num_tested, NUM_KINDS)
        kinds_keep: _Floats = np.power(_KIND_FORGET, tests)
        self._tests = self._tests * kinds_keep + tests
        self._fails = self._fails * kinds_keep + np.bincount(kinds, num_failed, NUM_KINDS)
        self._failures = np.maximum(self._fails / self._tests, _LEAST_FAILURE)


class Goodput:
    """Choice of each row's drafts in a step of decodes: the most tokens per second, at no request's expense.

    Each row has a balance in tokens. A step adds the tokens that the row got, less the step's seconds by those of the
    same step without drafts. Invariant, as far as the estimates know, whatever the drafts turn out to be worth: the
    balance stays above ``-(SLACK_TOKENS + SLACK · tokens so far)``, and above 0 where lower classes draft; with
    drafts of its own, `CREDIT` and `WAIT_CREDIT` waits lower. Without, a request is late by 1 token and 2 % at most.
    """

    def __init__(
        self, num_rows: int, most: int, step_seconds: Sequence[tuple[int, float]] = (), *, explores: bool = False
    ) -> None:
        """Allow rows up to `most` drafts.

        `step_seconds`: entries and seconds of measured steps, ascending. `explores`: try drafts that do not pay now
        and then, as their acceptance is known from no other steps.
        """
        self.cost = DecodeCost(num_rows * (1 + most), step_seconds)
        self.rates = AcceptanceRates(num_rows)
        self.balances, self.num_tokens = np.zeros((2, num_rows))
        self._classes, self._tested_in = np.zeros((2, num_rows), np.int64)  # service class, step of the last test
        self._num_steps = 0
        self._explores, self._is_trial = explores, False  # the last choice
        self._trial_in = self._trial_period = _TRIAL_PERIOD
        self._depths = np.arange(1, most + 1, dtype=np.int32)
        self._numbers = np.arange(1, num_rows * most + 1, dtype=np.int32)

    def enter(self, row: int, service_class: int) -> None:
        self.rates.enter(row)
        self.balances[row] = self.num_tokens[row] = 0.0
        self._classes[row] = service_class

    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        """Return the number of drafts of each row [n], at most `counts`, in all at most `budget`."""
        chosen = self._best(rows, counts, kinds, budget)
        self._is_trial = self._explores and self._num_steps >= self._trial_in and not chosen.any()
        return self._trial(rows, counts, budget) if self._is_trial else chosen

    def observe_drafts(
        self, rows: RowArray, kinds: Int32Array, num_tested: Int32Array, num_accepted: Int32Array
    ) -> None:
        """Learn from drafts of distinct rows, up to and with the first wrong one, whether or not a step ran them."""
        self._tested_in[rows] = self._num_steps
        self.rates.observe(rows, kinds, num_tested, num_accepted)

    def observe_step(self, rows: RowArray, num_tokens: Int32Array, step: DecodeStep, seconds: float) -> None:
        """Learn from a step of decodes alone, in which distinct rows got `num_tokens` [n]."""
        self._num_steps += 1
        if seconds > 0.0:  # a test's clock may stand still
            self.cost.observe(step, seconds)
        ratio = 1.0
        if step.num_drafts:
            self._trial_period = min(2 * self._trial_period, _MOST_PERIOD) if self._is_trial else _TRIAL_PERIOD
            self._trial_in = self._num_steps + self._trial_period
        if step.num_drafts or step.has_waited:
            # Drafts are chosen where the estimate is rather too low, and a pause is not their cost.
            estimate = float(self.cost.ratios(step.num_rows, np.array([step.num_drafts]), step.most_drafts)[0])
            ratio = seconds / self.cost.seconds(step.num_rows)
            ratio = min(max(ratio, estimate / _MOST_OFF), estimate * _MOST_OFF)
        self.balances[rows] += num_tokens - ratio
        self.num_tokens[rows] += num_tokens

    def _best(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        """Return the drafts of the best step, none if no step is clearly better than one without drafts."""
        best, least = np.zeros(len(rows), np.int32), (1.0 + MARGIN) * len(rows)
        rates, classes = self.rates.rates(rows, kinds), self._classes.take(rows)
        for lowest in set(classes.tolist()):  # mostly one; a larger number is a lower class
            chosen, tokens = self._best_of(rows, rates, counts * (classes <= lowest), budget, lowest)
            if tokens > least:
                best, least = chosen, tokens
        return best

    def _best_of(
        self, rows: RowArray, rates: _Floats, counts: Int32Array, budget: int, lowest: int
    ) -> tuple[Int32Array, float]:
        """Return the drafts of the best step that keeps the balances, and its tokens in the seconds of one without.

        The most probable drafts come first, so that each comes after those before it in its row.
        """
        num_rows, candidates = len(rows), counts.nonzero()[0]
        depths = self._depths[: counts.max()]
        powers = np.power.outer(rates.take(candidates), depths)
        powers *= depths <= counts.take(candidates)[:, None]
        order = (-powers).ravel().argsort(kind="stable")[: min(budget, np.count_nonzero(powers))]
        indices, probabilities = candidates.take(order // len(depths)), powers.ravel().take(order)
        most_drafts = np.maximum.accumulate(depths.take(order % len(depths)))
        ratios = self.cost.ratios(num_rows, self._numbers[: len(order)], most_drafts)
        tokens = (num_rows + probabilities.cumsum()) / ratios
        while len(order) and tokens[last := int(tokens.argmax())] > (1.0 + MARGIN) * num_rows:
            chosen = indices[: last + 1]
            most = self._most_ratio(rows, lowest, np.bincount(chosen, probabilities[: last + 1], num_rows))
            if ratios[last] <= most:
                return np.bincount(chosen, minlength=num_rows).astype(np.int32), float(tokens[last])
            tokens[ratios > most] = 0.0
        return indices[:0], 0.0

    def _most_ratio(self, rows: RowArray, lowest: int, gains: npt.ArrayLike = 0.0) -> float:
        """Return the longest step, by one without drafts, that keeps the balances. `gains`: of own drafts."""
        slack = (SLACK_TOKENS + SLACK * self.num_tokens.take(rows)) * (self._classes.take(rows) >= lowest)
        wait = self.cost.wait  # a step after one with drafts waits too
        own = np.where(np.greater(gains, 0.0), np.minimum(gains, CREDIT + WAIT_CREDIT * wait), -wait)
        return 1.0 + float((self.balances.take(rows) + slack + own).min())

    def _trial(self, rows: RowArray, counts: Int32Array, budget: int) -> Int32Array:
        """Return one draft for each of the rows whose last test is oldest, as far as the balances allow it."""
        candidates = np.flatnonzero(counts > 0)[:budget]
        candidates = candidates[self._tested_in.take(rows.take(candidates)).argsort(kind="stable")]
        ratios = self.cost.ratios(len(rows), self._numbers[: len(candidates)], 1)
        lowest = int(self._classes[rows.take(candidates)].max(initial=0))
        is_allowed = (ratios <= _TRIAL_RATIO * ratios[:1]) & (ratios <= self._most_ratio(rows, lowest))
        return np.bincount(candidates[is_allowed], minlength=len(rows)).astype(np.int32)
