"""Settings learned from a load: chosen on its first half, judged on its second.

Coordinate descent over few values of each setting. A value is taken if the simulated load is better with it beyond
the uncertainty: the 95 % interval of the paired difference, of the same requests under both settings, by a bootstrap
over blocks of consecutive requests (Künsch, 1989).
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tidewheel.batch import BoolArray
from tidewheel.bench.estimates import Estimate
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.stats import Objective
from tidewheel.workload.arrivals import FloatArray
from tidewheel.workload.traces import Trace

MIN_REQUESTS = 100
NUM_BLOCKS = 20  # of half a load
RESAMPLES = 1000
MIN_SIMULATIONS = 4  # both settings on both halves
NOT_SIMULATED = {
    "breaker_error_rate": "nothing fails",
    "pressure_memory, pressure_latency_ms": "the cost of quantised weights is not searched",
    "device_slice_ms, device_weight": "no other engine shares the device",
}

Change = Mapping[str, object]


class Measure(NamedTuple):
    """Figure of a load: `values` gives one value for each request, `reduce` makes one figure of them."""

    title: str
    unit: str
    scale: float
    is_better: int  # 1: higher; -1: lower
    values: Callable[[SimulationOutcomes], FloatArray]
    reduce: Callable[[FloatArray], float]

    def gain(self, difference: Estimate) -> Estimate:
        """Return the difference with a sign that is positive if it is an improvement."""
        mean, low, high = difference
        return difference if self.is_better > 0 else Estimate(-mean, -high, -low)


def _within_objectives(outcomes: SimulationOutcomes) -> FloatArray:
    trace = outcomes.trace
    ttfts, tpots = trace.ttft_objectives, trace.tpot_objectives
    if np.isfinite(np.minimum(ttfts, tpots)).any():
        is_late = (outcomes.ttft > ttfts) | (outcomes.tpot > tpots)
        return np.asarray(outcomes.finished & ~is_late, dtype=np.float64)
    return np.asarray(~outcomes.misses(Objective()), dtype=np.float64)


def _first_token(outcomes: SimulationOutcomes) -> FloatArray:
    return _until_end(outcomes, outcomes.ttft)


def _latency(outcomes: SimulationOutcomes) -> FloatArray:
    return _until_end(outcomes, outcomes.latency)


def _until_end(outcomes: SimulationOutcomes, times: FloatArray) -> FloatArray:
    """Return `times`, with the length of the whole run for each request that did not finish."""
    return np.where(outcomes.finished, times, outcomes.span)


def _lost(outcomes: SimulationOutcomes) -> FloatArray:
    return np.asarray(~outcomes.finished, dtype=np.float64)


def _mean(values: FloatArray) -> float:
    return float(values.mean())


def _p99(values: FloatArray) -> float:
    return float(np.quantile(values, 0.99))


GOODPUT = Measure("within objectives", "%", 100.0, 1, _within_objectives, _mean)
TTFT_P99 = Measure("TTFT p99", "ms", 1e3, -1, _first_token, _p99)
LATENCY = Measure("mean latency", "ms", 1e3, -1, _latency, _mean)
LOST = Measure("refused or lost", "%", 100.0, -1, _lost, _mean)
OBJECTIVES = {"goodput": GOODPUT, "ttft-p99": TTFT_P99, "latency": LATENCY}


def paired_difference(measure: Measure, now: FloatArray, other: FloatArray, seed: int) -> Estimate:
    """Return `other` less `now`, values of the same requests in order of arrival, with its 95 % interval."""
    rng = np.random.default_rng(seed)
    blocks = np.array_split(np.arange(len(now)), min(NUM_BLOCKS, len(now)))
    draws = np.empty(RESAMPLES)
    for number, chosen in enumerate(rng.integers(len(blocks), size=(RESAMPLES, len(blocks))).tolist()):
        index = np.concatenate([blocks[block] for block in chosen])
        draws[number] = measure.reduce(other[index]) - measure.reduce(now[index])
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return Estimate(measure.reduce(other) - measure.reduce(now), low, high)


def _around(name: str, value: float, factors: Sequence[float], least: float = 1) -> list[Change]:
    kind = type(value)
    return [{name: kind(value * factor)} for factor in factors if value * factor >= least]


def _step_budgets(config: EngineConfig, _: Objective) -> list[Change]:
    factors = (0.0625, 0.125, 0.25, 0.5, 2, 4)
    return _around("max_num_batched_tokens", config.max_num_batched_tokens, factors, least=16)


def _row_limits(config: EngineConfig, _: Objective) -> list[Change]:
    return _around("max_num_seqs", config.max_num_seqs, (0.25, 0.5, 2, 4))


def _ageings(config: EngineConfig, _: Objective) -> list[Change]:
    return _around("ageing_s", config.ageing_s, (0.1, 0.3, 3.0, 10.0), least=0.001)


def _chunk_limits(config: EngineConfig, _: Objective) -> list[Change]:
    budget = config.max_num_batched_tokens
    shares: list[Change] = _around("long_prefill_token_threshold", budget, (0.25, 0.5), least=16)
    return [{"long_prefill_token_threshold": None}, *shares]


def _tpot_targets(_: EngineConfig, limits: Objective) -> list[Change]:
    targets = [_rounded(1e3 * limits.tpot_s * share) for share in (0.5, 0.8)]
    return [{"target_tpot_ms": target} for target in (None, *targets)]


def _breakers(_: EngineConfig, limits: Objective) -> list[Change]:
    times = [_rounded(limits.ttft_s * share) for share in (0.25, 0.5, 1.0, 2.0)]
    return [{"breaker_queue_time_s": seconds} for seconds in (None, *times)]


def _governors(_: EngineConfig, limits: Objective) -> list[Change]:
    latencies = [_rounded(1e3 * limits.tpot_s * share) for share in (0.5, 0.8)]
    off = {"enable_seqs_governor": False, "governor_target_latency_ms": None}
    return [off, *({"enable_seqs_governor": True, "governor_target_latency_ms": one} for one in (None, *latencies))]


def _weights(config: EngineConfig, _: Objective) -> list[Change]:
    """Return changes that halve or double one tenant's weight: none unless the policy is `fair`, the only reader."""
    tenants: dict[str, dict[str, Any]] = json.loads(config.tenants or "{}")
    if config.scheduling_policy != "fair" or len(tenants) < 2:
        return []
    return [
        {"tenants": json.dumps({**tenants, name: {**limits, "weight": factor * limits.get("weight", 1)}})}
        for name, limits in tenants.items()
        for factor in (0.5, 2)
    ]


COORDINATES: tuple[Callable[[EngineConfig, Objective], list[Change]], ...] = (
    _row_limits,
    _step_budgets,
    _tpot_targets,
    _governors,
    _chunk_limits,
    _ageings,
    _weights,
    _breakers,
)  # fmt: skip - what refuses requests comes last


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def tightest_objective(trace: Trace) -> Objective:
    """Return the least `ttft_s` and `tpot_s` of all requests; the default where no request sets one."""
    ttft, tpot = float(trace.ttft_objectives.min()), float(trace.tpot_objectives.min())
    usual = Objective()
    return Objective(
        ttft if math.isfinite(ttft) else usual.ttft_s,
        tpot if math.isfinite(tpot) else usual.tpot_s,
    )


class Setting(NamedTuple):
    name: str
    now: object
    proposed: object


class Prediction(NamedTuple):
    """Figure of the second half, now and as proposed; times in seconds, shares from 0 to 1."""

    measure: Measure
    part: str  # class; empty: all requests
    now: float
    proposed: float
    difference: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of a search. `settings` is empty unless `found` is better on the second half too."""

    found: tuple[Setting, ...]  # better on the first half
    predictions: tuple[Prediction, ...]  # of `found`; the objective first
    num_simulations: int
    is_complete: bool  # no values were left untried

    @property
    def is_better(self) -> bool:
        if not self.predictions:
            return False
        measure, *_, difference = self.predictions[0]
        return measure.gain(difference).low > 0

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self.found if self.is_better else ()


class OutOfSimulations(Exception):
    """Raised with the best settings so far."""


class Search:
    """Search for settings that improve a measure of a load. Equal arguments give equal results."""

    def __init__(
        self,
        config: EngineConfig,
        trace: Trace,
        cost: CostModel,
        measure: Measure,
        *,
        num_simulations: int,
        seed: int,
        simulated: Callable[[], object] = lambda: None,
    ) -> None:
        """`simulated` is called after each simulation. Raise `ConfigError` for too few requests or simulations."""
        if config.kind != "text":
            raise ConfigError(f"the settings are of a model of kind {config.kind}: tune reads those of text models")
        if config.pressure_quantization != "none" and cost.quantized_share is None:
            raise ConfigError(
                f"pressure_quantization is {config.pressure_quantization}: the cost model needs a quantized_share, "
                "from a recording that has quantised steps"
            )
        if len(trace) < MIN_REQUESTS:
            raise ConfigError(f"the record has {len(trace)} requests: tune needs at least {MIN_REQUESTS}")
        if num_simulations < MIN_SIMULATIONS:
            raise ConfigError(f"num_simulations is {num_simulations}: it must be at least {MIN_SIMULATIONS}")
        half = np.arange(len(trace)) < len(trace) // 2
        self._first, self._second = trace.taken(half), trace.taken(~half)
        self._config = config
        self._max_model_len = max(trace.max_num_tokens, 2)
        self._cost = cost.with_cache(config.kv_cache_dtype)
        self._limits = tightest_objective(trace)
        self._measure = measure
        self._num_left = num_simulations - 2  # the second half, under both settings
        self._num_done = 0
        self._seed = seed
        self._simulated = simulated
        self._seen: dict[EngineConfig, FloatArray] = {}

    def run(self) -> Tuning:
        best, is_complete = self._config, True
        try:
            while (better := self._round(best)) != best:
                best = better
        except OutOfSimulations as stopped:
            (best,), is_complete = stopped.args, False
        found = tuple(_settings(self._config, best))
        predictions = tuple(self._predictions(best)) if found else ()
        return Tuning(found=found, predictions=predictions, num_simulations=self._num_done, is_complete=is_complete)

    def _round(self, best: EngineConfig) -> EngineConfig:
        for coordinate in COORDINATES:
            best = self._best_of(best, coordinate(best, self._limits))
        return best

    def _best_of(self, best: EngineConfig, changes: Sequence[Change]) -> EngineConfig:
        gained, before = 0.0, best
        for candidate in _valid(before, changes):
            try:
                values = self._values(candidate), self._values(before)
            except OutOfSimulations:
                raise OutOfSimulations(best) from None
            gain = self._measure.gain(paired_difference(self._measure, values[1], values[0], self._seed))
            if gain.low > 0 and gain.mean > gained:
                gained, best = gain.mean, candidate
        return best

    def _values(self, config: EngineConfig) -> FloatArray:
        if config not in self._seen:
            if not self._num_left:
                raise OutOfSimulations
            self._num_left -= 1
            self._seen[config] = self._measure.values(self._outcomes(config, self._first))
        return self._seen[config]

    def _outcomes(self, config: EngineConfig, trace: Trace) -> SimulationOutcomes:
        info = simulated_info(config, self._cost, max_model_len=self._max_model_len)
        outcomes = simulator_of(config, info, trace, self._cost).run()
        self._num_done += 1
        self._simulated()
        return outcomes

    def _predictions(self, best: EngineConfig) -> Iterator[Prediction]:
        outcomes = [self._outcomes(config, self._second) for config in (self._config, best)]
        everything = np.full(len(self._second), True)
        yield self._prediction(self._measure, "", everything, outcomes)
        for measure in (GOODPUT, LOST):
            if measure != self._measure:
                yield self._prediction(measure, "", everything, outcomes)
        for priority in Priority:
            chosen = self._second.priorities == priority
            for measure in (GOODPUT, TTFT_P99) if chosen.any() else ():
                yield self._prediction(measure, priority.name, chosen, outcomes)

    def _prediction(
        self, measure: Measure, part: str, chosen: BoolArray, outcomes: Sequence[SimulationOutcomes]
    ) -> Prediction:
        now, proposed = (measure.values(one)[chosen] for one in outcomes)
        difference = paired_difference(measure, now, proposed, self._seed)
        return Prediction(measure, part, measure.reduce(now), measure.reduce(proposed), difference)


def _valid(config: EngineConfig, changes: Sequence[Change]) -> Iterator[EngineConfig]:
    """Yield the config with each change that its other settings allow."""
    for change in changes:
        try:
            candidate = dataclasses.replace(config, **change)  # type: ignore[arg-type]
        except ConfigError:
            continue
        if candidate != config:
            yield candidate


def _settings(now: EngineConfig, proposed: EngineConfig) -> Iterator[Setting]:
    for field in dataclasses.fields(EngineConfig):
        values = getattr(now, field.name), getattr(proposed, field.name)
        if values[0] != values[1]:
            yield Setting(field.name, *values)
