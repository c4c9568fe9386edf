"""Tables of a stage: what its columns show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.bench.estimates import Estimate
from tidewheel.bench.results import StageResult
from tidewheel.bench.text_tables import NOTHING, Table, number

CLASS_ORDER = ("critical", "high", "normal", "low")
Figures = Mapping[str, Any]


class Column(NamedTuple):
    title: str
    unit: str
    cell: Callable[[Figures], str]


def with_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Format as `12.3 ± 0.4`, or with both ends if asymmetric."""
    mean, low, high = (part * scale for part in estimate)
    if not (math.isfinite(low) and math.isfinite(high)):
        return number(mean)
    above, below = high - mean, mean - low
    if math.isclose(above, below, rel_tol=0.01, abs_tol=1e-12):
        return f"{number(mean)} ± {number(above)}"
    return f"{number(mean)} ({number(low)} to {number(high)})"


def _rate(name: str, scale: float = 1.0) -> Callable[[Figures], str]:
    return lambda figures: with_interval(figures[name], scale)


def _milliseconds(name: str, quantile: str) -> Callable[[Figures], str]:
    return lambda figures: with_interval(figures[name][quantile], 1e3)


def _server(name: str, scale: float = 1.0) -> Callable[[Figures], str]:
    return lambda figures: number(figures["server"][name] * scale) if name in figures["server"] else NOTHING


def _errors(figures: Figures) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(figures["errors"].items())) or "0"


RATES = (
    Column("goodput", "req/s", _rate("goodput_per_s")),
    Column("goodput e2e", "req/s", _rate("goodput_e2e_per_s")),
    Column("within", "%", _rate("slo_attainment", 100.0)),
    Column("within e2e", "%", _rate("e2e_attainment", 100.0)),
    Column("done", "req/s", _rate("requests_per_s")),
    Column("output", "tok/s", _rate("output_tokens_per_s")),
    Column("fairness", "Jain", _rate("fairness")),
    Column("errors", "", _errors),
)
LATENCIES = tuple(
    Column(f"{name.upper() if name != 'e2e' else name} {quantile}", "ms", _milliseconds(f"{name}_s", quantile))
    for name, quantile in (
        ("ttft", "p50"), ("ttft", "p95"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"),
        ("e2e", "p50"), ("e2e", "p99"),
    )
)  # fmt: skip
SERVER = (
    Column("queue", "ms", _server("queue_s", 1e3)),
    Column("batch", "req/step", _server("batch_size")),
    Column("tokens", "per step", _server("tokens_per_step")),
    Column("step", "ms", _server("step_s", 1e3)),
    Column("busy", "%", _server("device_busy", 100.0)),
    Column("GPU", "%", _server("gpu_utilization", 100.0)),
    Column("CPUs", "%", _server("cpu_utilization", 100.0)),
    Column("KV use", "% mean", _server("kv_use", 100.0)),
    Column("KV use", "% max", _server("kv_use_max", 100.0)),
    Column("preempted", "", _server("preemptions")),
)
_IN_SHORT = (
    "goodput", "goodput e2e", "output", "errors", "TTFT p50", "TTFT p99", "TPOT p50", "e2e p99", "batch", "busy",
)  # fmt: skip
SHORT = tuple(column for column in (*RATES, *LATENCIES, *SERVER) if column.title in _IN_SHORT)


def table(result: StageResult, columns: Sequence[Column]) -> Table:
    """Return a row per load and target."""
    header = ["load", "target", *(f"{c.title} {c.unit}".strip() for c in columns)]
    return Table(header, [[*labels, *(c.cell(figures) for c in columns)] for labels, figures in _measured(result)])


def class_table(result: StageResult) -> Table:
    """Return a row per load, target and QoS class; none for one class."""
    header = ["load", "target", "class", "requests", "within the objective %", "TTFT p50 ms", "TTFT p99 ms",
              "e2e p50 ms", "e2e p99 ms", "errors"]  # fmt: skip
    rows = [
        [*labels, name, *_class_cells(figures["classes"][name])]
        for labels, figures in _measured(result)
        for name in sorted(figures.get("classes", ()), key=CLASS_ORDER.index)
    ]
    return Table(header, rows)


def capacity_table(findings: Figures) -> Table:
    """Return a row per objective and target, of what `capacity_findings` found."""
    header = ["objective", "target", "capacity req/s", "bracket req/s", "times the reference", "note"]
    rows = [
        [objective, target, _capacity(found), _bracket(found), _ratio(found), found["note"] or NOTHING]
        for objective, of_targets in findings.get("capacities", {}).items()
        for target, found in of_targets.items()
    ]
    return Table(header, rows)


def _measured(result: StageResult) -> Iterator[tuple[tuple[str, str], Figures]]:
    for index, load in enumerate(result.stage.loads):
        for target in result.stage.targets:
            if figures := result.figures(target.name, index):
                yield (str(load), target.name), figures


def _class_cells(figures: Figures) -> list[str]:
    latencies = [figures[name][q] * 1e3 for name in ("ttft_s", "e2e_s") for q in ("p50", "p99")]
    share = figures["slo_attainment"] * 100
    return [str(figures["requests"]), *map(number, (share, *latencies)), _errors(figures)]


def _capacity(found: Figures) -> str:
    return ("≥ " if math.isinf(found["bracket"][1]) else "") + number(found["per_s"])


def _bracket(found: Figures) -> str:
    low, high = found["bracket"]
    return f"{number(low)} to {number(high) if math.isfinite(high) else '?'}"


def _ratio(found: Figures) -> str:
    if found["ratio"] is None:
        return NOTHING
    return ("≥ " if found["ratio_is_lower_bound"] else "") + with_interval(Estimate(*found["ratio"]))
