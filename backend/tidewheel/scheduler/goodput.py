"""Number of drafts of each row in a step, by goodput: the expected tokens per second.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (arXiv 2406.14066).
No fixed number serves all batches: at the same acceptance, vLLM gained 67 % at batch 1 and lost 18 % at batch 32
(vllm-project/vllm#26504).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Float64Array, Int32Array, RowArray

NUM_KINDS = 20  # of proposals
MARGIN = 0.03  # least gain of drafts: it covers errors of the estimates
SLACK_TOKENS = 1.0  # that drafts may cost a request
SLACK = 0.02  # the same in proportion to its tokens
CREDIT = 1.0  # most tokens that a request's own drafts count before they are tested
WAIT_CREDIT = 3.0  # waits that are added to it

_PRIOR_RATE = 0.5  # acceptance of a kind before any test
_PRIOR_TESTS = 8.0  # weight of that rate
_KIND_FORGET = 0.999  # per test
_ROW_FORGET = 0.9  # per test
_KIND_TESTS = 4.0  # weight of the kind's rate beside a row's own tests
_LEAST_FAILURE = 0.005
_LEAST_RATE = 0.02  # of a draft that is considered

_UNMEASURED = (1, 0.01), (8, 0.0135), (64, 0.04)  # entries and seconds of steps, before any was measured
_NOISE = 0.1  # standard deviation of a step's log seconds, as the spreads below
_PACE_DRIFT = 0.03  # per step: other programs come and go
_FIRST_SPREADS = 0.3, 0.15, 0.3, 0.1  # of pace, overhead, wait and depth
_SIZE_SPREADS = 0.1, 0.3  # from one size to twice as many entries, measured and beyond
_COST_FORGET = 0.998  # per step
_MOST_SURPRISE = 3.0  # spreads that a step counts as at most: one pause does not mislead
_JUMP = 0.2  # spread of the pace after such a step
_MOST_OFF = 1.25  # factor from a step's estimate to the seconds that its rows pay
_MOST_CATCH_UP = 8.0  # plain steps that they pay for catching up in a step

_TRIAL_PERIOD = 32  # observed steps, mostly one for each look, before a trial
_MOST_PERIOD = 512  # the same after trials in vain, each of which doubles it
_TRIAL_RATIO = 1.05  # most seconds of a trial, over those of the smallest
_FEW_SIZES = 64  # that are compared before more are

PATIENCE = 5  # looks in vain, after which rows are looked at half as often
MOST_HALVINGS, MOST_HALVINGS_WITH_TRIALS = 4, 2  # trials are counted in looks


class DecodeStep(NamedTuple):
    """Size of a step of decodes."""

    num_rows: int
    num_drafts: int = 0
    most_drafts: int = 0  # of a row
    has_waited: bool = False  # for tokens that drafts may follow, where other steps are launched ahead
    has_caught_up: bool = False  # a draft model also read many tokens that it lacked: its seconds say little


class DecodeCost:
    """Estimate of a decode step's seconds.

    ``log seconds ≈ size(entries) + pace + [has drafts] · overhead + [has waited] · wait + log2(1 + most drafts) ·
    depth``, where `size` is interpolated between powers of two, and proportional beyond the largest. A Kalman filter
    follows the deviations of all terms from the seconds measured at load. Pace is the machine's speed, which steps
    without drafts show too, so a busy neighbour is not taken for the cost of drafts.
    """

    def __init__(self, max_entries: int, step_seconds: Sequence[tuple[int, float]] = ()) -> None:
        self._positions = np.log2(np.arange(1, max_entries + 1))
        self._knots = np.arange(max_entries.bit_length() + 1.0)  # log2 of entries
        sizes, seconds = np.array(step_seconds or _UNMEASURED).T
        beyond = np.maximum(self._knots - math.log2(sizes[-1]), 0.0)
        self._prior = np.interp(self._knots, np.log2(sizes), np.log(seconds)) + math.log(2.0) * beyond
        self._sizes = self._prior.copy()  # log seconds at the knots
        spreads = np.where(beyond == 0.0, *_SIZE_SPREADS)
        spreads[0] = 0.0  # the pace varies
        variances = np.cumsum(spreads**2)
        self._deviations = np.zeros(4 + len(spreads))  # pace, overhead, wait, depth, sizes
        self._covariance = np.diag([*_FIRST_SPREADS, *spreads]) ** 2
        self._covariance[4:, 4:] = np.minimum.outer(variances, variances)
        self._drift = (1.0 - _COST_FORGET**2) * self._covariance
        self._drift[0, 0] = _PACE_DRIFT**2
        self.wait = 0.0  # what a step takes longer for having waited, in steps launched ahead

    def observe(self, step: DecodeStep, seconds: float) -> None:
        knot, position = divmod(math.log2(step.num_rows + step.num_drafts), 1.0)
        features = np.zeros(len(self._deviations))
        features[:4] = 1.0, step.num_drafts > 0, step.has_waited, math.log2(1 + step.most_drafts)
        features[4 + int(knot) : 6 + int(knot)] = 1.0 - position, position
        self._deviations *= _COST_FORGET
        self._covariance = self._covariance * _COST_FORGET**2 + self._drift
        shared = self._covariance @ features
        variance = float(features @ shared) + _NOISE**2
        expected = float(np.interp(knot + position, self._knots, self._prior) + features @ self._deviations)
        most = _MOST_SURPRISE * math.sqrt(variance)
        surprise = min(max(math.log(seconds) - expected, -most), most)
        if abs(surprise) == most:
            self._covariance[0, 0] += _JUMP**2
        self._deviations += surprise / variance * shared
        self._covariance -= np.outer(shared, shared / variance)
        self._sizes = self._prior + self._deviations[4:]
        self.wait = max(math.exp(self._deviations[2]) - 1.0, 0.0)

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of a step without drafts."""
        return math.exp(np.interp(self._positions[num_rows - 1], self._knots, self._sizes) + self._deviations[0])

    def ratios(self, num_rows: int, num_drafts: Int32Array, most_drafts: Int32Array | int) -> Float64Array:
        """Return seconds of steps that wait, with `num_drafts` [n], `most_drafts` of a row, over those of plain."""
        sizes = np.interp(self._positions.take(num_drafts + (num_rows - 1)), self._knots, self._sizes)
        without = float(np.interp(self._positions[num_rows - 1], self._knots, self._sizes))
        _, overhead, wait, depth = self._deviations[:4].tolist()
        sizes += max(depth, 0.0) * self._positions.take(most_drafts) + overhead * (num_drafts > 0) + (wait - without)
        return np.maximum(np.exp(sizes), 1.0)


class AcceptanceRates:
    """Estimate of the probability that a draft is accepted, if all before it are.

    Each kind of proposals has a rate of failure, and each row a factor on it: the failures in its last ten or so
    tests, over those that their kinds predict. So a row whose short matches fail may still draft after a long one.
    """

    def __init__(self, num_rows: int) -> None:
        self._kinds = np.full((2, NUM_KINDS), _PRIOR_TESTS)  # tests, failures
        self._kinds[1] *= 1.0 - _PRIOR_RATE
        self._failures = self._kinds[1] / self._kinds[0]  # rates
        self._rows = np.zeros((3, num_rows))  # tests, failures, expected failures
        self._factors = np.ones(num_rows)

    def enter(self, row: int) -> None:
        self._rows[:, row], self._factors[row] = 0.0, 1.0

    def rates(self, rows: RowArray, kinds: Int32Array) -> Float64Array:
        rates: Float64Array = np.maximum(1.0 - self._failures.take(kinds) * self._factors.take(rows), 0.0)
        return rates

    def observe(self, rows: RowArray, kinds: Int32Array, num_tested: Int32Array, num_accepted: Int32Array) -> None:
        num_failed = num_tested - num_accepted  # 0 or 1, the last test
        keep = _ROW_FORGET**num_tested
        weights = (1.0 - keep) / (1.0 - _ROW_FORGET)
        now = np.stack((weights, num_failed, weights * self._failures.take(kinds)))
        tested, failed, expected = self._rows[:, rows] = self._rows[:, rows] * keep + now
        own = tested * failed / np.maximum(expected, _LEAST_FAILURE)
        self._factors[rows] = (own + _KIND_TESTS) / (tested + _KIND_TESTS)
        tests = np.bincount(kinds, num_tested, NUM_KINDS)
        self._kinds = self._kinds * _KIND_FORGET**tests + (tests, np.bincount(kinds, num_failed, NUM_KINDS))
        self._failures = np.maximum(self._kinds[1] / self._kinds[0], _LEAST_FAILURE)


class Goodput:
    """Choice of each row's drafts in a step of decodes: the most tokens per second, at a bounded loss of each.

    Each row has a balance in tokens. A step adds the tokens that the row got, less the step's seconds over those of
    the same step without drafts. Invariant, as far as the estimates know, but for one step of catching up: the
    balance stays above ``-(SLACK_TOKENS + SLACK · tokens so far)``, and above 0 where lower classes draft; with
    drafts of its own, `CREDIT` and `WAIT_CREDIT` waits lower. Other rows are late by at most 1 token and 2 %.
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
        self.classes: npt.NDArray[np.int8] = np.zeros(num_rows, np.int8)  # service classes
        self._tested_in = np.zeros(num_rows, np.int64)  # step of the last test or trial
        self._has_tested = False  # the last step with drafts
        self._num_steps = 0
        self._explores, self._is_trial = explores, False  # the last choice
        self._trial_in = self._trial_period = _TRIAL_PERIOD
        self._depths = np.arange(1, most + 1, dtype=np.int32)
        self._numbers = np.arange(1, num_rows * most + 1, dtype=np.int32)

    def enter(self, row: int) -> None:
        self.rates.enter(row)
        self.balances[row] = self.num_tokens[row] = 0.0

    def is_look_due(self, num_steps: int, num_vain_looks: int) -> bool:
        """Return whether to look for drafts, so many steps after the last look: seldom, if looks were in vain."""
        most = MOST_HALVINGS_WITH_TRIALS if self._explores else MOST_HALVINGS
        return num_steps >= 1 << min(num_vain_looks // PATIENCE, most)

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
        self._has_tested = len(rows) > 0
        self.rates.observe(rows, kinds, num_tested, num_accepted)

    def observe_step(self, rows: RowArray, num_tokens: Int32Array, step: DecodeStep, seconds: float) -> None:
        """Learn from a step of decodes alone, in which distinct rows got `num_tokens` [n]."""
        self._num_steps += 1
        if seconds > 0.0 and not step.has_caught_up:  # a test's clock may stand still
            self.cost.observe(step, seconds)
        ratio = 1.0
        if step.num_drafts and self._has_tested:  # else a trial goes on, with other rows
            self._trial_period = min(2 * self._trial_period, _MOST_PERIOD) if self._is_trial else _TRIAL_PERIOD
            self._trial_in = self._num_steps + self._trial_period
        if step.num_drafts or step.has_waited:
            # Drafts are chosen where the estimate is rather too low; a pause is not their cost, but catching up is.
            estimate = float(self.cost.ratios(step.num_rows, np.array([step.num_drafts]), step.most_drafts)[0])
            ratio = seconds / self.cost.seconds(step.num_rows)
            most = estimate * _MOST_OFF + _MOST_CATCH_UP * step.has_caught_up
            ratio = min(max(ratio, estimate / _MOST_OFF), most)
        self.balances[rows] += num_tokens - ratio
        self.num_tokens[rows] += num_tokens

    def _best(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        """Return the drafts of the best step, none if no step is clearly better than one without drafts."""
        num_rows, most, best = len(rows), min(int(counts.sum()), budget), np.zeros(len(rows), np.int32)
        least = (1.0 + MARGIN) * num_rows  # tokens in the seconds of a step without drafts
        rates = self.rates.rates(rows, kinds) * (counts > 0)
        if most > _FEW_SIZES:
            stride = most // _FEW_SIZES
            numbers = self._numbers[:most:stride]
            bounds = num_rows + rates.max() * (numbers + (stride - 1))
            if (bounds < least * self.cost.ratios(num_rows, numbers, 1)).all():
                return best
        classes = self.classes.take(rows)
        for lowest in set(classes[rates > _LEAST_RATE].tolist()):  # mostly one; a larger number is a lower class
            chosen, tokens = self._best_of(rows, np.where(classes <= lowest, rates, 0.0), counts, budget, lowest)
            if tokens > least:
                best, least = chosen, tokens
        return best

    def _best_of(
        self, rows: RowArray, rates: Float64Array, counts: Int32Array, budget: int, lowest: int
    ) -> tuple[Int32Array, float]:
        """Return the drafts of the best step that keeps the balances, and its tokens in the seconds of one without.

        The most probable drafts come first, so that each comes after those before it in its row.
        """
        num_rows, candidates = len(rows), np.flatnonzero(rates > _LEAST_RATE)
        depths = self._depths[: counts.max()]
        powers = np.power.outer(rates.take(candidates), depths)
        powers *= depths <= counts.take(candidates)[:, None]
        order = (-powers).ravel().argsort(kind="stable")[: min(budget, np.count_nonzero(powers))]
        indices, probabilities = candidates.take(order // len(depths)), powers.ravel().take(order)
        most_drafts = np.maximum.accumulate(depths.take(order % len(depths)))
        ratios = self.cost.ratios(num_rows, self._numbers[: len(order)], most_drafts)
        tokens = (num_rows + probabilities.cumsum()) / ratios
        while len(tokens) and tokens[last := int(tokens.argmax())] > num_rows:
            chosen = indices[: last + 1]
            most = self._most_ratio(rows, lowest, np.bincount(chosen, probabilities[: last + 1], num_rows))
            if ratios[last] <= most:
                return np.bincount(chosen, minlength=num_rows).astype(np.int32), float(tokens[last])
            tokens[ratios > most] = 0.0
        return indices[:0], 0.0

    def _most_ratio(self, rows: RowArray, lowest: int, gains: npt.ArrayLike = 0.0) -> float:
        """Return the longest step, over one without drafts, that keeps the balances. `gains`: of own drafts."""
        slack = (SLACK_TOKENS + SLACK * self.num_tokens.take(rows)) * (self.classes.take(rows) >= lowest)
        wait = self.cost.wait  # a step after one with drafts waits too
        own = np.where(np.greater(gains, 0.0), np.minimum(gains, CREDIT + WAIT_CREDIT * wait), -wait)
        return 1.0 + float((self.balances.take(rows) + slack + own).min())

    def _trial(self, rows: RowArray, counts: Int32Array, budget: int) -> Int32Array:
        """Return one draft for each of the rows whose last test is oldest, as far as budget and balances allow."""
        candidates = np.flatnonzero(counts > 0)
        candidates = candidates[self._tested_in.take(rows.take(candidates)).argsort(kind="stable")[:budget]]
        ratios = self.cost.ratios(len(rows), self._numbers[: len(candidates)], 1)
        lowest = int(self.classes[rows.take(candidates)].max(initial=0))
        is_allowed = (ratios <= _TRIAL_RATIO * ratios[:1]) & (ratios <= self._most_ratio(rows, lowest))
        self._tested_in[rows.take(candidates := candidates[is_allowed])] = self._num_steps
        return np.bincount(candidates, minlength=len(rows)).astype(np.int32)
