import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.bench.estimates import Estimate
from tidewheel.bench.outcome import Slo
from tidewheel.bench.results import StageResult
from tidewheel.bench.tables import NOTHING, TextTable, number

CLASS_ORDER = ("critical", "high", "normal", "low")
Figures = Mapping[str, Any]


class FigureColumn(NamedTuple):
    title: str
    unit: str
    path: str  # keys
    scale: float = 1.0

    def estimate(self, figures: Figures) -> Estimate:
        value = self._value(figures)
        is_unknown = value is None or value == {}
        parts = value if isinstance(value, Estimate) else (math.nan if is_unknown else value, math.nan, math.nan)
        return Estimate(*(part * self.scale for part in parts))

    def cell(self, figures: Figures) -> str:
        value = self._value(figures)
        if self.path == "errors":
            return ", ".join(f"{code} {count}" for code, count in sorted(value.items())) or "0"
        return str(value) if isinstance(value, int) else with_interval(self.estimate(figures))

    def _value(self, figures: Figures) -> Any:
        value: Any = figures
        for key in self.path.split("."):
            value = value.get(key, {})
        return value


def with_interval(estimate: Estimate) -> str:
    mean, low, high = estimate
    if not (math.isfinite(low) and math.isfinite(high)):
        return number(mean)
    above, below = high - mean, mean - low
    if math.isclose(above, below, rel_tol=0.01, abs_tol=1e-12):
        return f"{number(mean)} ± {number(above)}"
    return f"{number(mean)} ({number(low)} to {number(high)})"


_ERRORS = FigureColumn("errors", "", "errors")
RATES = (
    FigureColumn("goodput", "req/s", "goodput_per_s"),
    FigureColumn("goodput e2e", "req/s", "goodput_e2e_per_s"),
    FigureColumn("within", "%", "slo_attainment", 100.0),
    FigureColumn("within e2e", "%", "e2e_attainment", 100.0),
    FigureColumn("done", "req/s", "requests_per_s"),
    FigureColumn("output", "tok/s", "output_tokens_per_s"),
    FigureColumn("fairness", "Jain", "fairness"),
    _ERRORS,
)
LATENCIES = (
    FigureColumn("TTFT p50", "ms", "ttft_s.p50", 1e3),
    FigureColumn("TTFT p95", "ms", "ttft_s.p95", 1e3),
    FigureColumn("TTFT p99", "ms", "ttft_s.p99", 1e3),
    FigureColumn("TPOT p50", "ms", "tpot_s.p50", 1e3),
    FigureColumn("TPOT p99", "ms", "tpot_s.p99", 1e3),
    FigureColumn("ITL p99", "ms", "itl_s.p99", 1e3),
    FigureColumn("e2e p50", "ms", "e2e_s.p50", 1e3),
    FigureColumn("e2e p99", "ms", "e2e_s.p99", 1e3),
)
SERVER = (
    FigureColumn("queue", "ms", "server.queue_s", 1e3),
    FigureColumn("batch", "req/step", "server.batch_size"),
    FigureColumn("tokens", "per step", "server.tokens_per_step"),
    FigureColumn("step", "ms", "server.step_s", 1e3),
    FigureColumn("busy", "%", "server.device_busy", 100.0),
    FigureColumn("GPU", "%", "server.gpu_utilization", 100.0),
    FigureColumn("CPUs", "%", "server.cpu_utilization", 100.0),
    FigureColumn("KV use mean", "%", "server.kv_use", 100.0),
    FigureColumn("KV use max", "%", "server.kv_use_max", 100.0),
    FigureColumn("preempted", "", "server.preemptions"),
)
_CLASSES = (
    FigureColumn("requests", "", "requests"),
    FigureColumn("within the objective", "%", "slo_attainment", 100.0),
    RATES[0],
    *(column for column in LATENCIES if column.title in ("TTFT p50", "TTFT p99", "ITL p99", "e2e p50", "e2e p99")),
    _ERRORS,
)
COLUMNS = {column.title: column for column in (*RATES, *LATENCIES, *SERVER)}
SHORT = tuple(
    COLUMNS[title]
    for title in (
        "goodput", "goodput e2e", "output", "errors", "TTFT p50", "TTFT p99", "TPOT p50", "e2e p99", "batch", "busy",
    )
)  # fmt: skip


def table(result: StageResult, columns: Sequence[FigureColumn]) -> TextTable:
    rows = [[*labels, *(c.cell(figures) for c in columns)] for labels, figures in measured(result)]
    return TextTable(["load", "target", *headings(columns)], rows)


def verdicts(result: StageResult) -> list[str]:
    """Return a sentence per target at its highest load: requests in time (%), and TTFT and TPOT where too slow."""
    last = {target: (load, figures) for (load, target), figures in measured(result)}
    said = []
    for target, (load, figures) in last.items():
        share = COLUMNS["within"].estimate(figures).mean
        said.append(f"{target}, {load}: {share:.0f} % in time: {_times(figures, result.stage.slo)}")
    return said


def _times(figures: Figures, slo: Slo) -> str:
    times = [
        (COLUMNS["TTFT p50"].estimate(figures).mean, 1e3 * slo.ttft_s, "ms to the first token"),
        (COLUMNS["TPOT p50"].estimate(figures).mean, 1e3 * slo.tpot_s, "ms a token"),
    ]
    known = [time for time in times if math.isfinite(time[0])]
    late = [time for time in known if time[0] > time[1]]
    return (
        "; ".join(f"{number(found)} {unit}, objective {most:g}" for found, most, unit in late or known) or "no answer"
    )


def class_table(result: StageResult) -> TextTable:
    rows = [
        [*labels, name, *(c.cell(figures["classes"][name]) for c in _CLASSES)]
        for labels, figures in measured(result)
        for name in sorted(figures.get("classes", ()), key=lambda name: CLASS_ORDER.index(name.split()[0]))
    ]
    return TextTable(["load", "target", "class", *headings(_CLASSES)], rows)


def capacity_table(findings: Figures) -> TextTable:
    header = ["objective", "target", "capacity req/s", "bracket req/s", "times the reference", "note"]
    rows = []
    for objective, of_targets in findings.get("capacities", {}).items():
        for target, found in of_targets.items():
            low, high = found["bracket"]
            bracket = f"{number(low)} to {number(high) if math.isfinite(high) else '?'}"
            capacity = ("≥ " if math.isinf(high) else "") + number(found["per_s"])
            ratio = with_interval(Estimate(*found["ratio"])) if found["ratio"] else NOTHING
            sign = "≥ " if found["ratio_is_lower_bound"] else ""
            rows.append([objective, target, capacity, bracket, sign + ratio, found["note"] or NOTHING])
    return TextTable(header, rows)


def measured(result: StageResult) -> Iterator[tuple[tuple[str, str], Figures]]:
    for index, load in enumerate(result.stage.loads):
        for target in result.stage.targets:
            if figures := result.figures(target.name, index):
                yield (str(load), target.name), figures


def headings(columns: Sequence[FigureColumn]) -> list[str]:
    return [f"{c.title} {c.unit}".strip() for c in columns]
