from collections.abc import Callable, Sized
from typing import Any, Protocol

import numpy as np

from tidewheel.batch import BoolArray
from tidewheel.bench.estimates import jain
from tidewheel.errors import ConfigError, InternalError
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import Objective
from tidewheel.workload.arrivals import FloatArray
from tidewheel.workload.traces import Trace

UNKNOWN, FINISHED, REFUSED, DEADLINE, FAILED = range(5)
_ENDS = {
    FinishReason.STOP: FINISHED,
    FinishReason.LENGTH: FINISHED,
    FinishReason.DEADLINE: DEADLINE,
    FinishReason.ERROR: REFUSED,  # evicted while waiting, or hopeless
    None: REFUSED,
}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Figures = dict[str, Any]  # times in seconds


class SimulatedRequest(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def first_scheduled_time(self) -> float | None: ...
    @property
    def first_token_time(self) -> float | None: ...
    @property
    def last_token_time(self) -> float | None: ...
    @property
    def output_token_ids(self) -> Sized: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


Told = Callable[[int, SimulatedRequest], None]


class SimulationOutcomes:
    """Arrays by request; times in seconds of the trace, NaN if never reached."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace)
        self.trace = trace
        self.arrivals = trace.arrivals.copy()  # of turns after a pause: set as they arrive
        self.ends, self.replicas = np.full(count, UNKNOWN), np.full(count, -1)
        self.first_scheduled, self.first_token, self.last_token = (np.full(count, np.nan) for _ in range(3))
        self.output_tokens, self.cached_tokens, self.preemptions = (np.zeros(count, np.int32) for _ in range(3))

    def record(self, index: int, replica: int, request: SimulatedRequest) -> None:
        if self.ends[index] != UNKNOWN:
            raise InternalError(f"request {index} ended twice")
        self.ends[index] = _ENDS.get(request.finish_reason, FAILED)
        self.replicas[index] = replica
        if request.first_scheduled_time is not None:
            self.first_scheduled[index] = request.first_scheduled_time
            self.cached_tokens[index] = request.num_cached_tokens
            self.preemptions[index] = request.num_preemptions
        if request.first_token_time is not None and request.last_token_time is not None:
            self.first_token[index] = request.first_token_time
            self.last_token[index] = request.last_token_time
            self.output_tokens[index] = len(request.output_token_ids)

    def check_complete(self) -> None:
        if missing := int(np.count_nonzero(self.ends == UNKNOWN)):
            raise InternalError(f"{missing} requests never ended")

    @property
    def finished(self) -> BoolArray:
        return np.asarray(self.ends == FINISHED)

    def misses(self, objective: Objective) -> BoolArray:
        """Return which requests did not finish, or miss the objective."""
        is_late = (self.ttft > objective.ttft_s) | (self.tpot > objective.tpot_s)
        return np.asarray(~self.finished | is_late)

    @property
    def ttft(self) -> FloatArray:
        return self.first_token - self.arrivals

    @property
    def latency(self) -> FloatArray:
        return self.last_token - self.arrivals

    @property
    def queue_time(self) -> FloatArray:
        return self.first_scheduled - self.arrivals

    @property
    def tpot(self) -> FloatArray:
        """Seconds per output token after the first; NaN with fewer than two tokens."""
        with np.errstate(invalid="ignore", divide="ignore"):
            tokens = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
            return np.asarray((self.last_token - self.first_token) / tokens)

    @property
    def span(self) -> float:
        if not np.isfinite(self.last_token).any():
            return 0.0
        return float(np.nanmax(self.last_token) - self.trace.arrivals[0])


def throughput(outcomes: SimulationOutcomes) -> float:
    rate = steady_rate(outcomes)
    if rate is None:
        count = int(outcomes.finished.sum())
        raise ConfigError(f"only {count} of {len(outcomes.trace)} requests can run: see max_model_len and num_blocks")
    return rate


def steady_rate(outcomes: SimulationOutcomes) -> float | None:
    """Return finished requests/s in the middle of a run; None for too few requests."""
    ends = np.sort(outcomes.last_token[outcomes.finished])
    first, last = len(ends) // 5, len(ends) * 7 // 10
    if len(ends) < 10 or ends[last] <= ends[first]:
        return None
    return float((last - first) / (ends[last] - ends[first]))


def keeps_up(outcomes: SimulationOutcomes) -> bool:
    """Return whether no request was lost, and queue times do not grow.

    The median queue time of the last quarter must be at most twice the second quarter's plus 50 ms.
    """
    if np.isin(outcomes.ends, (REFUSED, FAILED)).any():
        return False
    waits = np.nan_to_num(outcomes.queue_time[outcomes.finished])
    quarter = len(waits) // 4
    if quarter == 0:
        return True
    return bool(np.median(waits[-quarter:]) <= 2.0 * np.median(waits[quarter : 2 * quarter]) + 0.05)


def summarise(outcomes: SimulationOutcomes) -> Figures:
    trace, span = outcomes.trace, max(outcomes.span, 1e-12)
    finished, tokens = outcomes.finished, served_tokens(outcomes)
    return {
        "num_requests": len(trace),
        "offered_per_s": trace.rate,
        "finished": int(finished.sum()),
        "refused": int((outcomes.ends == REFUSED).sum()),
        "past_deadline": int((outcomes.ends == DEADLINE).sum()),
        "failed": int((outcomes.ends == FAILED).sum()),
        "objectives": attainment(outcomes, np.full(len(trace), True)),
        "late_share": float(outcomes.misses(Objective()).mean()),
        "span_s": outcomes.span,
        "requests_per_s": float(finished.sum()) / span,
        "steady_requests_per_s": steady_rate(outcomes),
        "keeps_up": keeps_up(outcomes),
        "output_tokens_per_s": float(outcomes.output_tokens.sum()) / span,
        **_latencies(outcomes, finished),
        "mean_in_system": float(np.nansum(outcomes.latency)) / span,  # Little's law
        "mean_waiting": float(np.nansum(outcomes.queue_time)) / span,
        "preemptions": int(outcomes.preemptions.sum()),
        "cached_share": float(outcomes.cached_tokens.sum()) / max(float(trace.prompt_tokens.sum()), 1.0),
        "classes": {
            priority.name: _part(outcomes, chosen)
            for priority in Priority
            if (chosen := trace.priorities == priority).any()
        },
        "tenants": {
            name: {
                "served_share": tokens[name] / max(sum(tokens.values()), 1.0),
                **_part(outcomes, trace.tenants == index),
            }
            for index, name in enumerate(trace.tenant_names)
            if name in tokens
        },
        "loras": {
            name: _part(outcomes, chosen)
            for index, name in enumerate(trace.lora_names)
            if (chosen := trace.loras == index).any()
        },
        "fairness": jain(list(tokens.values())) if any(tokens.values()) else 1.0,
    }


def attainment(outcomes: SimulationOutcomes, chosen: BoolArray) -> float | None:
    """Return the share of the chosen requests with objectives that met them; None if there are none."""
    trace = outcomes.trace
    is_late = (outcomes.ttft > trace.ttft_objectives) | (outcomes.tpot > trace.tpot_objectives)
    with_objective = chosen & np.isfinite(np.minimum(trace.ttft_objectives, trace.tpot_objectives))
    is_met = outcomes.finished & ~is_late
    return float(is_met[with_objective].mean()) if with_objective.any() else None


def served_tokens(outcomes: SimulationOutcomes) -> dict[str, float]:
    trace = outcomes.trace
    done = outcomes.finished & (outcomes.last_token <= outcomes.arrivals.max())
    tokens = np.where(done, trace.prompt_tokens + outcomes.output_tokens, 0)
    sums = np.bincount(trace.tenants, weights=tokens, minlength=len(trace.tenant_names))
    present = np.bincount(trace.tenants, minlength=len(trace.tenant_names)) > 0
    return {name: float(sums[i]) for i, name in enumerate(trace.tenant_names) if present[i]}


def _part(outcomes: SimulationOutcomes, chosen: BoolArray) -> Figures:
    return {
        "num_requests": int(chosen.sum()),
        "refused": int((chosen & (outcomes.ends == REFUSED)).sum()),
        "objectives": attainment(outcomes, chosen),
        **_latencies(outcomes, chosen & outcomes.finished),
    }


def _latencies(outcomes: SimulationOutcomes, chosen: BoolArray) -> Figures:
    return {
        "ttft_s": _distribution(outcomes.ttft[chosen]),
        "tpot_s": _distribution(outcomes.tpot[chosen]),
        "latency_s": _distribution(outcomes.latency[chosen]),
        "queue_s": _distribution(outcomes.queue_time[chosen]),
    }


def _distribution(values: FloatArray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", *QUANTILES))
    quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
    return {"mean": float(values.mean()), **dict(zip(QUANTILES, quantiles, strict=True))}


def mean_in_system(load: float, service_scv: float = 1.0) -> float:
    """Return the mean number of jobs in an M/G/1 queue (Kleinrock, "Queueing Systems, Volume 1", 1975, chapter 5).

    `service_scv`: variance of service times over their squared mean.
    """
    if not 0 <= load < 1:
        raise ConfigError(f"load is {load:g}: a queue settles only from 0 to below 1")
    return load + load**2 * (1 + service_scv) / (2 * (1 - load))
