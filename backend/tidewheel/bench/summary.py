"""Figures of a run, and of repeats."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidewheel.bench.estimates import Estimate, bootstrap_quantiles, jain, mean, quantile, t_interval
from tidewheel.bench.outcome import Outcome, Slo

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATENCIES: Mapping[str, Callable[[Outcome], float | None]] = {
    "ttft_s": lambda o: o.first_token,
    "tpot_s": lambda o: o.tpot,
    "e2e_s": lambda o: o.latency,
}
CLASS_NAMES = {0: "normal", 1: "critical", 2: "high", 3: "normal", 4: "low"}
RATES = (
    "requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "goodput_per_s", "goodput_e2e_per_s",
    "slo_attainment",
)  # fmt: skip
Figures = dict[str, float]


def span(outcomes: Sequence[Outcome]) -> float:
    """Return seconds from first sending to last end."""
    ends = [o.sent + o.ended for o in outcomes if o.ended is not None]
    return max(ends) - min(o.sent for o in outcomes) if ends else 0.0


def rates(outcomes: Sequence[Outcome], slo: Slo, offered_s: float | None) -> Figures:
    """Return figures per second, from first sending to last end.

    Goodput counts full answers within the objective. An open loop divides it by `offered_s`, the time of sending, or
    until its last turn: each request had its chance, however long the queue drains.
    """
    seconds = span(outcomes)
    if not seconds:
        return dict.fromkeys(
            ("requests_per_s", "output_tokens_per_s", "goodput_per_s", "goodput_e2e_per_s"), math.nan
        )
    window = max(offered_s, max(o.sent for o in outcomes)) if offered_s else seconds
    return {
        "requests_per_s": sum(o.is_complete for o in outcomes) / seconds,
        "output_tokens_per_s": sum(o.num_tokens for o in outcomes if not o.error) / seconds,
        "prompt_tokens_per_s": sum(o.num_prompt_tokens for o in outcomes if not o.error) / seconds,
        "goodput_per_s": sum(map(slo.is_met, outcomes)) / window,
        "goodput_e2e_per_s": sum(map(slo.is_met_at_end, outcomes)) / window,
        "slo_attainment": sum(map(slo.is_met, outcomes)) / len(outcomes),
    }


def summarise_run(outcomes: Sequence[Outcome], slo: Slo, offered_s: float | None = None) -> dict[str, Any]:
    answered = [o for o in outcomes if not o.error]
    gaps = [gap for o in answered if o.streamed for gap in o.inter_token_latencies()]
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": sum(o.is_complete for o in outcomes),
        "errors": dict(Counter(o.code for o in outcomes if o.error)),
        "output_tokens": sum(o.num_tokens for o in outcomes),
        "span_s": span(outcomes),
        **rates(outcomes, slo, offered_s),
        "fairness": fairness(outcomes),
        "send_lag_p99_s": quantile([o.lag for o in outcomes], 0.99),
        "itl_s": _quantiles(gaps),
    }
    for name, of in LATENCIES.items():
        figures[name] = _quantiles([value for o in answered if (value := of(o)) is not None])
    if classes := _by_class(outcomes, slo):
        figures["classes"] = classes
    return figures


def summarise_repeats(repeats: Sequence[Sequence[Outcome]], slo: Slo, offered_s: float | None) -> dict[str, Any]:
    """Give rates as means with Student's t, latencies as pooled quantiles with percentile bootstrap."""
    per_repeat = [rates(outcomes, slo, offered_s) for outcomes in repeats if outcomes]
    figures: dict[str, Any] = {name: t_interval([rate[name] for rate in per_repeat]) for name in RATES}
    pooled = [o for outcomes in repeats for o in outcomes]
    answered = [o for o in pooled if not o.error]
    for name, of in LATENCIES.items():
        values = [value for o in answered if (value := of(o)) is not None]
        estimates = bootstrap_quantiles(values, list(QUANTILES.values()))
        figures[name] = dict(zip(QUANTILES, estimates, strict=True))
    gaps = [gap for o in answered if o.streamed for gap in o.inter_token_latencies()]
    figures["itl_s"] = {name: Estimate(quantile(gaps, q), math.nan, math.nan) for name, q in QUANTILES.items()}
    figures["errors"] = dict(Counter(o.code for o in pooled if o.error))
    figures["requests"] = len(pooled)
    figures["fairness"] = t_interval([fairness(outcomes) for outcomes in repeats if outcomes])
    figures["send_lag_p99_s"] = quantile([o.lag for o in pooled], 0.99)
    if classes := _by_class(pooled, slo):
        figures["classes"] = classes
    return figures


def fairness(outcomes: Sequence[Outcome]) -> float:
    """Return Jain's index over tenants' served shares, or, without tenants, over requests' tokens/s."""
    wanted: dict[str, float] = defaultdict(float)
    got: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        tenant = outcome.offered.parameters.get("tenant", "")
        wanted[tenant] += outcome.offered.num_output_tokens
        got[tenant] += outcome.num_tokens
    if len(wanted) > 1:
        return jain([got[tenant] / wanted[tenant] for tenant in wanted])
    return jain([o.num_tokens / o.latency if o.latency else 0.0 for o in outcomes])


def _by_class(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, Any]:
    classes: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        classes[CLASS_NAMES.get(outcome.offered.parameters.get("priority", 0), "normal")].append(outcome)
    if len(classes) < 2:
        return {}
    return {
        name: {
            "requests": len(members),
            "completed": sum(o.is_complete for o in members),
            "slo_attainment": sum(map(slo.is_met, members)) / len(members),
            "ttft_s": _quantiles([o.first_token for o in members if o.first_token is not None]),
            "e2e_s": _quantiles([o.latency for o in members if not o.error and o.latency is not None]),
            "errors": dict(Counter(o.code for o in members if o.error)),
        }
        for name, members in classes.items()
    }


def _quantiles(values: Sequence[float]) -> Figures:
    return {"mean": mean(values), **{name: quantile(values, q) for name, q in QUANTILES.items()}}
