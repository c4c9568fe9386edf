"""Objectives of speed beside measurements, physical limits and what the step model expects, all of one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import sub, truediv
from typing import NamedTuple

from gpu.expected_figures import (
    Range,
    decode_step_ms,
    headline_percent,
    percent_of_bandwidth,
    prompt_ms,
    prompt_percent,
)
from gpu.measurements import OURS, Ceilings, Measurement

LEVEL = 0.95  # counts as level
BANDWIDTH = "% of bandwidth"
QWEN, LLAMA = "qwen3-0.6b", "llama-3.1-8b"
SMALL_KERNELS = ("residual RMSNorm", "qk-norm, RoPE, KV write", "RoPE, KV write", "SiLU-mul")


class Objective(NamedTuple):
    """All numbers have the target's unit. `found` is None if it was not measured."""

    point: int
    what: str
    target: float
    at_least: bool  # else at most
    unit: str
    found: float | None
    limit: float | None = None  # of the device
    estimate: Range | None = None

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        is_met = self.found >= self.target if self.at_least else self.found <= self.target
        return "met" if is_met else "MISSED"

    @property
    def times_apart(self) -> float:
        """Return by what factor the target is missed; 1 or less if it is met or was not measured."""
        if self.found is None:
            return 0.0
        more, less = (self.target, self.found) if self.at_least else (self.found, self.target)
        return more / less if less > 0 else math.inf if more > 0 else 1.0


class Results:
    """Figures by name, owner and parts of the case; None if not measured."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._all = measurements

    def every(self, name: str, *parts: str, who: str = OURS) -> list[Measurement]:
        return [m for m in self._all if m.name == name and m.who == who and all(part in m.case for part in parts)]

    def others(self, name: str, part: str) -> list[Measurement]:
        return [m for m in self._all if m.name == name and part in m.case and m.who != OURS]

    def last(self, name: str, *parts: str, who: str = OURS) -> Measurement | None:
        return next(reversed(self.every(name, *parts, who=who)), None)

    def value(self, name: str, *parts: str) -> float | None:
        found = self.last(name, *parts)
        return None if found is None else found.value

    def percent(self, name: str, *parts: str) -> float | None:
        found = self.last(name, *parts)
        return None if found is None else found.percent

    def compared(
        self, how: Callable[[float, float], float], name: str, *parts: str, ours: str = OURS, other: str
    ) -> float | None:
        left, right = self.last(name, *parts, who=ours), self.last(name, *parts, who=other)
        return None if left is None or right is None else how(left.value, right.value)


def _worst(values: Sequence[float | None], choose: Callable[[Sequence[float]], float]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def objectives(measurements: Sequence[Measurement], device: Ceilings) -> list[Objective]:
    results = Results(measurements)
    parts = (_correctness, partial(_kernels, device=device), partial(_steps, device=device),
             partial(_throughput, device=device), _path, _swap)  # fmt: skip
    return [objective for part in parts for objective in part(results)]


def largest_differences(found: Sequence[Objective], count: int = 5) -> list[Objective]:
    """Return the missed objectives, the farthest first."""
    missed = [one for one in found if one.verdict == "MISSED"]
    return sorted(missed, key=lambda one: -one.times_apart)[:count]


def _correctness(results: Results) -> Iterator[Objective]:
    for name in ("smoke", "tests of the kernels", "tests marked gpu"):
        tests = results.last(name)
        failures = None if tests is None else float(tests.details["failures"] + tests.details["errors"])
        yield Objective(1, f"failed {name}", 0, False, "", failures)
    exact = results.last("parity with transformers", "float32")
    rounded = results.last("parity with transformers", "bfloat16")
    diverged = None if exact is None else float(len(exact.samples))
    spacings = None if rounded is None else max(rounded.samples, default=0.0)
    yield Objective(1, "float32 answers that differ from transformers", 0, False, "", diverged)
    yield Objective(1, "bfloat16: logits apart at the first divergence", 2, False, "spacings", spacings)


def _kernels(results: Results, device: Ceilings) -> Iterator[Objective]:
    decode, over_fa3 = "decode attention", partial(results.compared, truediv, other="FlashAttention-3")
    busy, long = ("32:8 heads", "batch 128, context 2048"), ("32:8 heads", "batch 1, context 8192")
    expected = percent_of_bandwidth(decode)
    for what, case, target in (("batch 128, context 2k", busy, 80), ("batch 1, context 8k", long, 65)):
        yield Objective(
            2, f"{decode}, {what}", target, True, BANDWIDTH, results.percent(decode, *case), 100, expected
        )
    level = _worst([over_fa3(decode, *case) for case in (busy, long)], min)
    yield Objective(2, "decode attention over FlashAttention-3", LEVEL, True, "x", level)
    prefill = results.percent("prefill attention", "32:8 heads", "context 8192")
    expected = prompt_percent(device)
    yield Objective(2, "prefill attention, 8k causal", 50, True, "% of arithmetic", prefill, 100, expected)
    causal = over_fa3("prefill attention", "32:8 heads", "context 8192")
    yield Objective(2, "prefill attention, 8k causal, over FlashAttention-3", 0.75, True, "x", causal)
    small = [m.percent for name in SMALL_KERNELS for m in results.every(name, "8192 tokens")]
    expected = percent_of_bandwidth("small kernels")
    yield Objective(
        2, "fused small kernels at 8k tokens, the slowest", 80, True, BANDWIDTH, _worst(small, min), 100, expected
    )


def _steps(results: Results, device: Ceilings) -> Iterator[Objective]:
    """Yield steps that have a limit, in milliseconds, with targets of so many times the limit."""
    for model, batch, times in ((QWEN, 256, 1.4), (LLAMA, 128, 1.25)):
        case = f"{model}, batch {batch}, context 512"
        step = results.last("decode step", case)
        yield _timed(f"decode step, {case}", step, times, decode_step_ms(model, batch, 512, device))
    for model in (QWEN, LLAMA):
        case = f"{model}, lone prompt of 8192"
        first = results.last("time to first token", case)
        yield _timed(f"first token, {case}", first, 1.35, prompt_ms(model, 8192, device))
    cases = [f"{LLAMA}, batch {batch}, context {context}" for batch in (8, 32, 128) for context in (512, 2048)]
    steps = [results.last("decode step", case) for case in cases]
    ratios = [None if step is None else float(step.details["times_limit"]) for step in steps]
    yield Objective(
        3, "8B decode steps over their limit, batch 8-128, context 512-2k", 1.25, False, "x", _worst(ratios, max), 1
    )


def _timed(what: str, found: Measurement | None, times: float, expected: Range) -> Objective:
    limit = None if found is None else found.limit
    target = times * (limit or expected.low)
    return Objective(3, what, target, False, "ms", None if found is None else found.value, limit, expected)


def _throughput(results: Results, device: Ceilings) -> Iterator[Objective]:
    for model in (QWEN, LLAMA):
        runs = results.every("engine throughput", model, "256 requests")
        percent, expected = (runs[0].percent if runs else None), headline_percent(model, device)
        yield Objective(4, f"{model}, 256 requests", 75, True, "% of speed of light", percent, 100, expected)
    best = [m.value for m in results.others("ours over peer", QWEN) if m.who.startswith("transformers")]
    yield Objective(4, "over transformers generate_batch, 0.6B", 3.0, True, "x", _worst(best, min))
    for model, target in ((QWEN, 1.0), (LLAMA, LEVEL)):
        others = [m.value for m in results.others("ours over peer", model) if not m.who.startswith("transformers")]
        yield Objective(4, f"over the fastest other engine, {model}", target, True, "x", _worst(others, min))


def _path(results: Results) -> Iterator[Objective]:
    through = partial(results.compared, ours="through Triton", other="in-process")
    for model, share in ((LLAMA, 95.0), (QWEN, 85.0)):
        ratio = through(truediv, "streamed tokens", model)
        percent = None if ratio is None else 100.0 * ratio
        yield Objective(5, f"through Triton, {model}, 256 concurrent", share, True, "% of in-process", percent)
        extra = through(sub, "inter-token latency p50", model)
        yield Objective(5, f"p50 ITL above in-process, {model}", 2.0, False, "ms", extra)
    for model, idle in ((LLAMA, 3.0), (QWEN, 10.0)):
        yield Objective(6, f"device idle, {model}", idle, False, "%", results.value("idle device", model))


def _swap(results: Results) -> Iterator[Objective]:
    swaps = [m.percent for way in ("out", "in") for m in results.every(f"swap {way}", "256 blocks")]
    yield Objective(7, "swap, 256 blocks, of the bus", 80, True, "%", _worst(swaps, min))
    chosen = [m.value for m in results.every("recompute over swap") if m.details["cost_model_swaps"]]
    yield Objective(7, "recompute over swap where the cost model swaps", 1.0, True, "x", _worst(chosen, min))
