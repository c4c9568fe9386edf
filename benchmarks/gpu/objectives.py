"""Objectives of speed on an H200 beside measurements; ratios are within one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._all = measurements

    def one(self, name: str, *parts: str, who: str = OURS) -> Measurement | None:
        """Return the last figure whose case holds all `parts`."""
        found = self.every(name, *parts, who=who)
        return found[-1] if found else None

    def every(self, name: str, *parts: str, who: str = OURS) -> list[Measurement]:
        return [m for m in self._all if m.name == name and m.who == who and all(part in m.case for part in parts)]

    def others(self, name: str, part: str) -> list[Measurement]:
        return [m for m in self._all if m.name == name and part in m.case and m.who != OURS]


def _percent(measurement: Measurement | None) -> float | None:
    return None if measurement is None else measurement.percent


def _value(measurement: Measurement | None) -> float | None:
    return None if measurement is None else measurement.value


def _ratio(over: Measurement | None, under: Measurement | None) -> float | None:
    return None if over is None or under is None else over.value / under.value


def _worst(values: Sequence[float | None], choose: Callable[[Sequence[float]], float]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def objectives(measurements: Sequence[Measurement]) -> list[Objective]:
    results = Results(measurements)
    return [*_correctness(results), *_kernels(results), *_steps(results), *_throughput(results), *_path(results)]


def _failures(results: Results, name: str) -> float | None:
    found = results.one(name)
    return None if found is None else float(found.details["failures"] + found.details["errors"])


def _correctness(results: Results) -> list[Objective]:
    exact = results.one("parity with transformers", "float32")
    rounded = results.one("parity with transformers", "bfloat16")
    diverged = None if exact is None else float(len(exact.samples))
    spacings = None if rounded is None else max(rounded.samples, default=0.0)
    return [
        Objective(1, "failed tests of the kernels", 0, False, "", _failures(results, "tests of the kernels")),
        Objective(1, "failed tests marked gpu", 0, False, "", _failures(results, "tests marked gpu")),
        Objective(1, "float32 answers that differ from transformers", 0, False, "", diverged),
        Objective(1, "bfloat16: logits apart at the first divergence", 2, False, "spacings", spacings),
    ]


def _kernels(results: Results) -> list[Objective]:
    decode, prefill, fa3 = "decode attention", "prefill attention", "FlashAttention-3"
    busy, long = ("32:8 heads", "batch 128, context 2048"), ("32:8 heads", "batch 1, context 8192")
    small = [m.percent for name in SMALL_KERNELS for m in results.every(name, "8192 tokens")]
    level = [_ratio(results.one(decode, *case), results.one(decode, *case, who=fa3)) for case in (busy, long)]
    causal = ("32:8 heads", "context 8192")
    return [
        Objective(2, f"{decode}, batch 128, context 2k", 80, True, BANDWIDTH, _percent(results.one(decode, *busy))),
        Objective(2, f"{decode}, batch 1, context 8k", 65, True, BANDWIDTH, _percent(results.one(decode, *long))),
        Objective(2, "decode attention over FlashAttention-3", LEVEL, True, "x", _worst(level, min)),
        Objective(2, "prefill attention, 8k causal, over FlashAttention-3", 0.75, True, "x",
                  _ratio(results.one(prefill, *causal), results.one(prefill, *causal, who=fa3))),
        Objective(2, "fused small kernels at 8k tokens, the slowest", 80, True, BANDWIDTH, _worst(small, min)),
    ]  # fmt: skip


def _steps(results: Results) -> list[Objective]:
    def over_limit(model: str, batches: Sequence[int], contexts: Sequence[int]) -> float | None:
        steps = [
            results.one("decode step", f"{model}, batch {batch}, context {context}")
            for batch in batches
            for context in contexts
        ]
        return _worst([None if step is None else float(step.details["times_limit"]) for step in steps], max)

    return [
        Objective(3, "8B decode step over its limit, batch 8-128, context 512-2k", 1.25, False, "x",
                  over_limit(LLAMA, (8, 32, 128), (512, 2048))),
        Objective(3, "0.6B decode step over its limit, batch 256", 1.5, False, "x",
                  over_limit(QWEN, (256,), (512, 2048))),
    ]  # fmt: skip


def _throughput(results: Results) -> list[Objective]:
    found: list[Objective] = []
    for model in (QWEN, LLAMA):
        runs = results.every("engine throughput", model, "256 requests")
        percent = _percent(runs[0]) if runs else None
        found.append(Objective(4, f"{model}, 256 requests", 70, True, "% of speed of light", percent))
    best = [m.value for m in results.others("ours over peer", QWEN) if m.who.startswith("transformers")]
    found.append(Objective(4, "over transformers generate_batch, 0.6B", 3.0, True, "x", _worst(best, min)))
    for model, target in ((QWEN, 1.0), (LLAMA, LEVEL)):
        others = [m.value for m in results.others("ours over peer", model) if not m.who.startswith("transformers")]
        found.append(Objective(4, f"over the fastest other engine, {model}", target, True, "x", _worst(others, min)))
    return found


def _path(results: Results) -> list[Objective]:
    def pair(name: str, model: str) -> tuple[Measurement | None, Measurement | None]:
        return results.one(name, model, who="through Triton"), results.one(name, model, who="in-process")

    found: list[Objective] = []
    for model, share in ((LLAMA, 95.0), (QWEN, 85.0)):
        ratio = _ratio(*pair("streamed tokens", model))
        percent = None if ratio is None else 100.0 * ratio
        found.append(
            Objective(5, f"through Triton, {model}, 256 concurrent", share, True, "% of in-process", percent)
        )
        served, alone = pair("inter-token latency p50", model)
        extra = None if served is None or alone is None else served.value - alone.value
        found.append(Objective(5, f"p50 ITL above in-process, {model}", 2.0, False, "ms", extra))
    for model, idle in ((LLAMA, 3.0), (QWEN, 10.0)):
        found.append(
            Objective(6, f"device idle, {model}", idle, False, "%", _value(results.one("idle device", model)))
        )
    swaps = [m.percent for way in ("out", "in") for m in results.every(f"swap {way}", "256 blocks")]
    found.append(Objective(7, "swap, 256 blocks, of the bus", 80, True, "%", _worst(swaps, min)))
    found.append(
        Objective(7, "recompute over swap where the cost model swaps", 1.0, True, "x", _where_chosen(results))
    )
    return found


def _where_chosen(results: Results) -> float | None:
    ways: list[dict[str, Any]] = [m.details for m in results.every("recompute over swap")]
    chosen = [
        statistics.median(way["recompute_s"]) / statistics.median(way["swap_s"])
        for way in ways
        if way["cost_model_swaps"]
    ]
    return _worst(chosen, min)
