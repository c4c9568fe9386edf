"""Conclusions from stages, as ratios with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.bench import BenchError
from tidewheel.bench.estimates import Estimate, quantile, ratio_interval
from tidewheel.bench.outcome import Outcome
from tidewheel.bench.results import StageResult
from tidewheel.bench.summary import rates

Speeds = dict[str, list[float]]
EFFICIENCIES = {
    "scheduling_efficiency": ("mixed lengths", "equal lengths"),
    "prefix_caching_gain": ("a shared prompt", "prompts of their own"),
}


def lone_tpot(repeats: Sequence[Sequence[Outcome]], ttft: float) -> float:
    """Return the median time per output token of requests served one at a time.

    Answers in one piece are taken to need `ttft` seconds for a first token. Raise `BenchError` without answers.
    """
    answered = [o for outcomes in repeats for o in outcomes if o.is_complete and o.num_tokens > 1]
    times = [
        o.tpot if o.tpot is not None else max(0.0, o.last_token - ttft) / (o.num_tokens - 1)
        for o in answered
        if o.last_token is not None
    ]
    if not times:
        raise BenchError("no request was answered alone: there is no objective to derive; give --ttft and --tpot")
    return quantile(times, 0.5)


def comparison(result: StageResult, load: int, ours: str, reference: str) -> dict[str, Any]:
    """Compare `ours` to `reference` at one load; return nothing if either is missing."""
    mine, theirs = result.outcomes(ours, load), result.outcomes(reference, load)
    if not mine or not theirs:
        return {}
    slo = result.stage.slo
    seconds = result.stage.seconds

    def goodput(repeats: Sequence[Sequence[Outcome]], *, at_end: bool) -> list[float]:
        name = "goodput_e2e_per_s" if at_end else "goodput_per_s"
        return [rates(outcomes, slo, seconds)[name] for outcomes in repeats]

    def p99_ttft(repeats: Sequence[Sequence[Outcome]]) -> list[float]:
        return [quantile([o.first_token for o in one if o.first_token is not None], 0.99) for one in repeats]

    findings: dict[str, Any] = {"comparison_load": str(result.stage.loads[load])}
    for name, at_end in (("goodput_ratio", False), ("goodput_ratio_e2e", True)):
        findings |= _ratio(name, goodput(mine, at_end=at_end), goodput(theirs, at_end=at_end), 1 / seconds)
    return findings | _ratio("p99_ttft_ratio", p99_ttft(mine), p99_ttft(theirs), math.inf)


def _ratio(name: str, mine: list[float], theirs: list[float], least: float) -> dict[str, Any]:
    """Return the ratio of paired repeats, or of sums, without interval, if a value is 0.

    A reference of zeros counts as `least`, which makes the ratio a lower bound.
    """
    is_bound = not any(value > 0 for value in theirs)
    if is_bound and not math.isfinite(least):
        return {name: None, f"{name}_reason": "the reference has no value"}
    filled = [least] * len(theirs) if is_bound else theirs
    pairs = [(a, b) for a, b in zip(mine, filled, strict=False) if not math.isnan(a + b)]
    ours, others = [a for a, _ in pairs], [b for _, b in pairs]
    if all(ours) and all(others):
        ratio = ratio_interval(ours, others)
    else:
        ratio = Estimate(sum(ours) / (sum(others) or math.nan), math.nan, math.nan)
    return {name: ratio.mean, f"{name}_interval": [ratio.low, ratio.high], f"{name}_is_lower_bound": is_bound}


def offline_speeds(result: StageResult) -> Speeds:
    slo = result.stage.slo
    return {
        target.name: [rates(one, slo, None)["output_tokens_per_s"] for one in result.outcomes(target.name, 0)]
        for target in result.stage.targets
    }


def offline_ratios(result: StageResult, ours: str) -> dict[str, Any]:
    speeds = offline_speeds(result)
    findings: dict[str, Any] = {"offline_ratios": {}}
    for target in result.stage.targets:
        if target.name == ours or not speeds[target.name] or not speeds[ours]:
            continue
        ratio = _paired(speeds[ours], speeds[target.name])
        findings["offline_ratios"][target.name] = list(ratio)
        if target.kind == "vllm":
            findings |= {"vllm_cpu_ratio": ratio.mean, "vllm_cpu_ratio_interval": [ratio.low, ratio.high]}
    return findings


def efficiency_ratios(speeds: Mapping[str, Speeds], ours: str) -> dict[str, Any]:
    """Return each engine's speed against its own, and the ratios of `ours` to the others."""
    findings: dict[str, Any] = {}
    for name, (tested, plain) in EFFICIENCIES.items():
        by_target = {target: _paired(values, speeds[plain][target]) for target, values in speeds[tested].items()}
        mine = by_target[ours].mean
        findings[name] = {target: list(ratio) for target, ratio in by_target.items()}
        findings[f"{name}_ratios"] = {t: mine / ratio.mean for t, ratio in by_target.items() if t != ours}
    return findings


def _paired(mine: list[float], theirs: list[float]) -> Estimate:
    count = min(len(mine), len(theirs))
    return ratio_interval(mine[:count], theirs[:count])
