import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidewheel.bench.estimates import Estimate, bootstrap_quantiles, jain, mean, quantile, t_interval
from tidewheel.bench.outcome import RequestOutcome, Slo

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATENCIES: Mapping[str, Callable[[RequestOutcome], float | None]] = {
    "ttft_s": lambda o: o.first_token,
    "tpot_s": lambda o: o.tpot,
    "e2e_s": lambda o: o.latency,
}
CLASS_NAMES = {0: "normal", 1: "critical", 2: "high", 3: "normal", 4: "low"}
RATES = (
    "requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "goodput_per_s", "goodput_e2e_per_s",
    "slo_attainment", "e2e_attainment",
)  # fmt: skip
Figures = dict[str, float]


def span(outcomes: Sequence[RequestOutcome]) -> float:
    ends = [o.sent + o.ended for o in outcomes if o.ended is not None]
    return max(ends) - min(o.sent for o in outcomes) if ends else 0.0


def rates(outcomes: Sequence[RequestOutcome], slo: Slo, offered_s: float | None) -> Figures:
    """Return throughput and goodput per second, in an open loop per second of sending, `offered_s` or more."""
    seconds, window = span(outcomes), sending_s(outcomes, offered_s)
    if not seconds:
        return dict.fromkeys(RATES, math.nan)
    num_met, num_met_at_end = sum(map(slo.is_met, outcomes)), sum(map(slo.is_met_at_end, outcomes))
    return {
        "requests_per_s": sum(o.is_complete for o in outcomes) / seconds,
        "output_tokens_per_s": sum(o.num_tokens for o in outcomes if not o.error) / seconds,
        "prompt_tokens_per_s": sum(o.num_prompt_tokens for o in outcomes if not o.error) / seconds,
        "goodput_per_s": num_met / window,
        "goodput_e2e_per_s": num_met_at_end / window,
        "slo_attainment": num_met / len(outcomes),
        "e2e_attainment": num_met_at_end / len(outcomes),
    }


def sending_s(outcomes: Sequence[RequestOutcome], offered_s: float | None) -> float:
    """Return the seconds that goodput counts: `offered_s` or until the last is sent, without it the whole run."""
    return max(offered_s, max(o.sent for o in outcomes)) if offered_s else span(outcomes)


def summarise_run(outcomes: Sequence[RequestOutcome], slo: Slo, offered_s: float | None = None) -> dict[str, Any]:
    return {
        **_counts(outcomes, slo, sending_s(outcomes, offered_s)),
        **rates(outcomes, slo, offered_s),
        "completed": sum(o.is_complete for o in outcomes),
        "output_tokens": sum(o.num_tokens for o in outcomes),
        "span_s": span(outcomes),
        "fairness": fairness(outcomes),
        **{name: _quantiles(values) for name, values in _latencies(outcomes).items()},
    }


def summarise_repeats(
    repeats: Sequence[Sequence[RequestOutcome]], slo: Slo, offered_s: float | None
) -> dict[str, Any]:
    per_repeat = [rates(outcomes, slo, offered_s) for outcomes in repeats if outcomes]
    pooled = [o for outcomes in repeats for o in outcomes]
    latencies = _latencies(pooled)
    gaps = latencies.pop("itl_s")
    quantiles = list(QUANTILES.values())
    drawn = {name: bootstrap_quantiles(values, quantiles) for name, values in latencies.items()}
    return {
        **_counts(pooled, slo, sum(sending_s(outcomes, offered_s) for outcomes in repeats if outcomes)),
        **{name: t_interval([rate[name] for rate in per_repeat]) for name in RATES},
        "fairness": t_interval([fairness(outcomes) for outcomes in repeats if outcomes]),
        **{name: dict(zip(QUANTILES, estimates, strict=True)) for name, estimates in drawn.items()},
        "itl_s": {name: Estimate(quantile(gaps, q), math.nan, math.nan) for name, q in QUANTILES.items()},
    }


def _counts(outcomes: Sequence[RequestOutcome], slo: Slo, seconds: float) -> dict[str, Any]:
    counts = {
        "requests": len(outcomes),
        "errors": dict(Counter(o.code for o in outcomes if o.error)),
        "send_lag_p99_s": quantile([o.lag for o in outcomes], 0.99),
    }
    classes = _by_class(outcomes, slo, seconds)
    return counts | {"classes": classes} if len(classes) > 1 else counts


def _latencies(outcomes: Sequence[RequestOutcome]) -> dict[str, list[float]]:
    answered = [o for o in outcomes if not o.error]
    latencies = {name: [value for o in answered if (value := of(o)) is not None] for name, of in LATENCIES.items()}
    return latencies | {"itl_s": [gap for o in answered if o.streamed for gap in o.inter_token_latencies()]}


def fairness(outcomes: Sequence[RequestOutcome]) -> float:
    """Return Jain's index over service per tenant; without tenants, over tokens/s per request."""
    wanted: dict[str, float] = defaultdict(float)
    got: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        tenant = outcome.offered.parameters.get("tenant", "")
        wanted[tenant] += outcome.offered.num_output_tokens
        got[tenant] += outcome.num_tokens
    if len(wanted) > 1:
        return jain([got[tenant] / wanted[tenant] for tenant in wanted])
    return jain([o.num_tokens / o.latency if o.latency else 0.0 for o in outcomes])


def _by_class(outcomes: Sequence[RequestOutcome], slo: Slo, seconds: float) -> dict[str, Any]:
    """Return figures by class, and by one-shot model in it."""
    classes: dict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        name = CLASS_NAMES.get(outcome.offered.parameters.get("priority", 0), "normal")
        classes[f"{name} {outcome.offered.entry}".strip()].append(outcome)
    return {name: _class_figures(members, slo, seconds) for name, members in classes.items()}


def _class_figures(members: Sequence[RequestOutcome], slo: Slo, seconds: float) -> dict[str, Any]:
    latencies, num_met = _latencies(members), sum(map(slo.is_met, members))
    return {
        "requests": len(members),
        "completed": sum(o.is_complete for o in members),
        "slo_attainment": num_met / len(members),
        "goodput_per_s": num_met / seconds if seconds else math.nan,
        "ttft_s": _quantiles([o.first_token for o in members if o.first_token is not None]),
        "itl_s": _quantiles(latencies["itl_s"]),
        "e2e_s": _quantiles(latencies["e2e_s"]),
        "errors": dict(Counter(o.code for o in members if o.error)),
    }


def _quantiles(values: Sequence[float]) -> Figures:
    return {"mean": mean(values), **{name: quantile(values, q) for name, q in QUANTILES.items()}}
