"""Objectives of speed on an H200 beside measurements; ratios are within one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import sub, truediv
from typing import NamedTuple

from gpu.measurements import OURS, Measurement

LEVEL = 0.95  # counts as level
BANDWIDTH = "% of bandwidth"
QWEN, LLAMA = "qwen3-0.6b", "llama-3.1-8b"
SMALL_KERNELS = ("residual RMSNorm", "qk-norm, RoPE, KV write", "RoPE, KV write", "SiLU-mul")


class Objective(NamedTuple):
    """`found` has the target's unit; None: not measured."""

    point: int
    what: str
    target: float
    at_least: bool  # else at most
    unit: str
    found: float | None

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        is_met = self.found >= self.target if self.at_least else self.found <= self.target
        return "met" if is_met else "MISSED"


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


def objectives(measurements: Sequence[Measurement]) -> list[Objective]:
    results = Results(measurements)
    parts = (_correctness, _kernels, _steps, _throughput, _path, _swap)
    return [objective for part in parts for objective in part(results)]


def _correctness(results: Results) -> Iterator[Objective]:
    for name in ("tests of the kernels", "tests marked gpu"):
        tests = results.last(name)
        failures = None if tests is None else float(tests.details["failures"] + tests.details["errors"])
        yield Objective(1, f"failed {name}", 0, False, "", failures)
    exact = results.last("parity with transformers", "float32")
    rounded = results.last("parity with transformers", "bfloat16")
    diverged = None if exact is None else float(len(exact.samples))
    spacings = None if rounded is None else max(rounded.samples, default=0.0)
    yield Objective(1, "float32 answers that differ from transformers", 0, False, "", diverged)
    yield Objective(1, "bfloat16: logits apart at the first divergence", 2, False, "spacings", spacings)


def _kernels(results: Results) -> Iterator[Objective]:
    decode, over_fa3 = "decode attention", partial(results.compared, truediv, other="FlashAttention-3")
    busy, long = ("32:8 heads", "batch 128, context 2048"), ("32:8 heads", "batch 1, context 8192")
    yield Objective(2, f"{decode}, batch 128, context 2k", 80, True, BANDWIDTH, results.percent(decode, *busy))
    yield Objective(2, f"{decode}, batch 1, context 8k", 65, True, BANDWIDTH, results.percent(decode, *long))
    level = _worst([over_fa3(decode, *case) for case in (busy, long)], min)
    yield Objective(2, "decode attention over FlashAttention-3", LEVEL, True, "x", level)
    causal = over_fa3("prefill attention", "32:8 heads", "context 8192")
    yield Objective(2, "prefill attention, 8k causal, over FlashAttention-3", 0.75, True, "x", causal)
    small = [m.percent for name in SMALL_KERNELS for m in results.every(name, "8192 tokens")]
    yield Objective(2, "fused small kernels at 8k tokens, the slowest", 80, True, BANDWIDTH, _worst(small, min))


def _steps(results: Results) -> Iterator[Objective]:
    for model, name, batches, target in (
        (LLAMA, "8B decode step over its limit, batch 8-128, context 512-2k", (8, 32, 128), 1.25),
        (QWEN, "0.6B decode step over its limit, batch 256", (256,), 1.5),
    ):
        cases = [f"{model}, batch {batch}, context {context}" for batch in batches for context in (512, 2048)]
        steps = [results.last("decode step", case) for case in cases]
        slowest = _worst([None if step is None else float(step.details["times_limit"]) for step in steps], max)
        yield Objective(3, name, target, False, "x", slowest)


def _throughput(results: Results) -> Iterator[Objective]:
    for model in (QWEN, LLAMA):
        runs = results.every("engine throughput", model, "256 requests")
        percent = runs[0].percent if runs else None
        yield Objective(4, f"{model}, 256 requests", 70, True, "% of speed of light", percent)
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
