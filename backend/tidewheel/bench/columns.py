"""Result tables for terminal, Markdown and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.bench.estimates import Estimate
from tidewheel.bench.results import StageResult

NOTHING = "-"
CLASS_ORDER = ("critical", "high", "normal", "low")


class Column(NamedTuple):
    title: str
    unit: str
    cell: Callable[[Mapping[str, Any]], str]


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str]]


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def with_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """Format as `12.3 ± 0.4`, or with both ends if asymmetric."""
    mean, low, high = (part * scale for part in estimate)
    if not (math.isfinite(low) and math.isfinite(high)):
        return number(mean)
    above, below = high - mean, mean - low
    if math.isclose(above, below, rel_tol=0.01, abs_tol=1e-12):
        return f"{number(mean)} ± {number(above)}"
    return f"{number(mean)} ({number(low)} to {number(high)})"


def _rate(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: with_interval(figures[name])


def _milliseconds(name: str, quantile: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: with_interval(figures[name][quantile], 1e3)


def _server(name: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: number(figures["server"][name] * scale) if name in figures["server"] else NOTHING


def _errors(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(figures["errors"].items())) or "0"


RATES = (
    Column("goodput", "req/s", _rate("goodput_per_s")),
    Column("goodput e2e", "req/s", _rate("goodput_e2e_per_s")),
    Column("done", "req/s", _rate("requests_per_s")),
    Column("output", "tok/s", _rate("output_tokens_per_s")),
    Column("fairness", "Jain", _rate("fairness")),
    Column("errors", "", _errors),
)
LATENCIES = (
    Column("TTFT p50", "ms", _milliseconds("ttft_s", "p50")),
    Column("TTFT p95", "ms", _milliseconds("ttft_s", "p95")),
    Column("TTFT p99", "ms", _milliseconds("ttft_s", "p99")),
    Column("TPOT p50", "ms", _milliseconds("tpot_s", "p50")),
    Column("TPOT p99", "ms", _milliseconds("tpot_s", "p99")),
    Column("ITL p99", "ms", _milliseconds("itl_s", "p99")),
    Column("e2e p50", "ms", _milliseconds("e2e_s", "p50")),
    Column("e2e p99", "ms", _milliseconds("e2e_s", "p99")),
)
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
    header = ["load", "target", *(f"{c.title} {c.unit}".strip() for c in columns)]
    rows = []
    for index, load in enumerate(result.stage.loads):
        for target in result.stage.targets:
            if figures := result.figures(target.name, index):
                rows.append([str(load), target.name, *(column.cell(figures) for column in columns)])
    return Table(header, rows)


def class_table(result: StageResult) -> Table:
    """Return a row per load, target and QoS class; none for one class."""
    header = ["load", "target", "class", "requests", "within the objective %", "TTFT p50 ms", "TTFT p99 ms",
              "e2e p50 ms", "e2e p99 ms", "errors"]  # fmt: skip
    rows = []
    for index, load in enumerate(result.stage.loads):
        for target in result.stage.targets:
            classes = result.figures(target.name, index).get("classes", {})
            for name in sorted(classes, key=CLASS_ORDER.index):
                rows.append([str(load), target.name, name, *_class_cells(classes[name])])
    return Table(header, rows)


def _class_cells(figures: Mapping[str, Any]) -> list[str]:
    latencies = [figures[name][q] * 1e3 for name in ("ttft_s", "e2e_s") for q in ("p50", "p99")]
    share = figures["slo_attainment"] * 100
    return [str(figures["requests"]), *map(number, (share, *latencies)), _errors(figures)]


def without_empty(one: Table) -> Table:
    """Drop empty columns, and rows if no column is left."""
    kept = [i for i in range(len(one.header)) if i < 2 or any(row[i] != NOTHING for row in one.rows)]
    if len(kept) <= 2:
        return Table(one.header, [])
    return Table([one.header[i] for i in kept], [[row[i] for i in kept] for row in one.rows])


def as_text(one: Table) -> str:
    lines = [one.header, *one.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(one.header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def as_markdown(one: Table) -> str:
    rule = ["---", "---", *["--:"] * (len(one.header) - 2)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [one.header, rule, *one.rows])
