import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from tidewheel.bench.capacity import GOAL, WHOLE_ANSWER
from tidewheel.bench.charts import (
    COLOURS,
    GREYS,
    GRID,
    INK,
    MARKERS,
    ChartImage,
    legend_below,
    logarithmic,
    panels,
    style,
)
from tidewheel.bench.figure_columns import COLUMNS, measured, verdicts
from tidewheel.bench.results import StageResult
from tidewheel.bench.targets import BenchTarget

MOST_PANELS = 4


class ChartPanel(NamedTuple):
    title: str
    note: str
    columns: tuple[str, ...]
    is_logarithmic: bool = False


_LATENCIES = {"First token, ms": "TTFT", "Further tokens, ms each": "TPOT", "Whole answer, ms": "e2e"}
_GOAL = f"{GOAL * 100:.0f} %"
_WITHIN = ChartPanel("Within the objective, %", f"by the whole answer; dotted: {_GOAL}", ("within e2e",))
_TTFT = ChartPanel("Time to first token, p99, ms", "logarithmic: less is better", ("TTFT p99",), is_logarithmic=True)
_ANSWER = ChartPanel("Whole answer, p99, ms", "logarithmic: less is better", ("e2e p99",), is_logarithmic=True)
_OUTPUT = ChartPanel("Output, tokens/s", "more is better", ("output",))
_GOODPUT = ChartPanel("Goodput, requests/s", "outline: judged by the whole answer", ("goodput", "goodput e2e"))
_TPOT = ChartPanel("Time per output token, ms", "p50; dashed: p99", ("TPOT p50", "TPOT p99"))
_E2E = ChartPanel("Whole answer, ms", "p50; dashed: p99", ("e2e p50", "e2e p99"))
_BUSY = ChartPanel("Engine busy, %", "time in steps over time", ("busy",))
_BATCH = ChartPanel("Batch, requests", "a step, or an execution of Triton's", ("batch",))


def pictures(result: StageResult) -> list[ChartImage]:
    loads, name = result.stage.loads, result.stage.name.replace(" ", "_")
    names = {target for (_, target), _ in measured(result)}
    targets = [target for target in result.stage.targets if target.name in names]
    if not targets or result.stage.is_preliminary:
        return []
    if len(targets) * len(loads) == 1:
        return [_quantiles(result, targets[0], name)]
    if all(load.kind == "closed" for load in loads) and len(loads) >= 3:
        shown = (_OUTPUT, _first_known(result, _TPOT, _E2E), _first_known(result, _BUSY, _BATCH))
        return [_lines(result, targets, name, shown, "requests in flight")]
    is_search = result.stage.longest_s is not None
    if is_search:
        return [_each_target(result, targets, f"{name}_rates")]
    if all(load.rate is not None for load in loads) and len(loads) > 3:
        return [_lines(result, targets, name, (_WITHIN, _TTFT, _ANSWER), "offered, requests/s")]
    return [_bars(result, targets, name, (_GOODPUT, _TTFT, _OUTPUT))]


def capacity_picture(findings: Mapping[str, Any], targets: Sequence[BenchTarget]) -> ChartImage:
    found, objective = findings["capacities"][WHOLE_ANSWER], findings["objective"]
    order = sorted(found, key=lambda name: (float(found[name]["per_s"]), -float(found[name]["bracket"][1])))
    figure, (axes,) = panels(height=1.4 + 0.36 * len(order))
    ours = {target.name for target in targets if target.kind == "ours"}
    for row, target in enumerate(order):
        one, (low, high) = found[target], found[target]["bracket"]
        high = high if math.isfinite(high) else one["per_s"]
        axes.barh(row, one["per_s"], 0.62, color=COLOURS[0] if target in ours else GREYS[1])
        axes.plot([low, high], [row, row], color=INK, linewidth=0.9, marker="|", markersize=5)
        axes.annotate(_capacity(one), (high, row), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(order)), order)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    style(axes, "Capacity, requests/s", f"{_GOAL} of whole answers in time; line: between which rates it lies")
    axes.grid(axis="y", visible=False)
    caption = (
        f"Highest rate of Poisson arrivals at which {_GOAL} of requests meet the objective: {objective['ttft_s']:g} "
        f"s to the first token and {objective['tpot_s'] * 1e3:g} ms for each other one, together for a whole answer. "
        f"Lines: the bracket. x: over {findings['reference']}."
    )
    return ChartImage("capacity", caption, figure)


def _capacity(one: Mapping[str, Any]) -> str:
    low, high = one["bracket"]
    if not low:
        return f"under {high:.3g}"
    ratio = f"   {'≥ ' * one['ratio_is_lower_bound']}{one['ratio'][0]:.1f}x" if one["ratio"] else ""
    return f"{'' if math.isfinite(high) else '≥ '}{one['per_s']:.3g}{ratio}"


def colours(targets: Sequence[BenchTarget]) -> dict[str, str]:
    ordered = sorted(targets, key=lambda target: (target.kind != "ours", target.name != "continuous"))
    greys, others = iter(GREYS * len(targets)), iter(COLOURS * len(targets))
    return {target.name: next(greys if target.kind == "baseline" else others) for target in ordered}


def _first_known(result: StageResult, panel: ChartPanel, other: ChartPanel) -> ChartPanel:
    column = COLUMNS[panel.columns[0]]
    return panel if any(math.isfinite(column.estimate(figures).mean) for _, figures in measured(result)) else other


def _lines(
    result: StageResult, targets: Sequence[BenchTarget], name: str, shown: Sequence[ChartPanel], label: str
) -> ChartImage:
    figure, panes = panels(len(shown))
    colour = colours(result.stage.targets)
    for axes, panel in zip(panes, shown, strict=True):
        for target, marker in zip(targets, MARKERS * len(targets), strict=False):
            figures = [(load.value, result.figures(target.name, i)) for i, load in enumerate(result.stage.loads)]
            for column, dashes in zip(panel.columns, ("-", "--"), strict=False):
                points = [(x, COLUMNS[column].estimate(f).mean) for x, f in figures if f]
                axes.plot(*zip(*points, strict=True), dashes, color=colour[target.name], marker=marker,
                          markersize=5, label=target.name if dashes == "-" else None)  # fmt: skip
        axes.set_xlabel(label)
        logarithmic(axes, "x")
        if result.stage.loads[0].kind == "closed":
            axes.set_xticks([load.value for load in result.stage.loads])
            axes.set_xticks([], minor=True)
        _finish(axes, panel)
        if panel is _WITHIN:
            axes.axhline(GOAL * 100, color=INK, linewidth=0.8, linestyle=":")
    legend_below(figure, panes[0])
    return ChartImage(name, f"{result.stage.title}.", figure)


def _each_target(result: StageResult, targets: Sequence[BenchTarget], name: str) -> ChartImage:
    rows = -(-len(targets) // MOST_PANELS)
    figure, panes = panels(min(MOST_PANELS, len(targets)), rows, height=0.4 + 1.9 * rows, sharex=True, sharey=True)
    column = COLUMNS[_WITHIN.columns[0]]
    lines = {}
    for target in targets:
        figures = [(load.value, result.figures(target.name, i)) for i, load in enumerate(result.stage.loads)]
        points = [(x, column.estimate(f).mean) for x, f in figures if f]
        lines[target.name] = list(zip(*points, strict=True))
    for axes, target in zip(panes, targets, strict=False):
        for other, points in lines.items():
            if other != target.name:
                axes.plot(*points, color=GRID, linewidth=1.0)
        axes.plot(*lines[target.name], color=COLOURS[0], marker="o", markersize=4)
        logarithmic(axes, "x")
        axes.axhline(GOAL * 100, color=INK, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, 105)
        style(axes, target.name)
    for axes in panes[len(targets) :]:
        axes.set_visible(False)
    figure.supxlabel("offered, requests/s (logarithmic)", fontsize=9)
    figure.supylabel("whole answers in time, %", fontsize=9)
    return ChartImage(name, f"{result.stage.title}. Share of whole answers in time; dotted: {_GOAL}.", figure)


def _quantiles(result: StageResult, target: BenchTarget, name: str) -> ChartImage:
    figure, panes = panels(3, height=2.6)
    figures = result.figures(target.name, 0)
    for axes, (title, kind) in zip(panes, _LATENCIES.items(), strict=True):
        names = [f"{kind} {quantile}" for quantile in ("p50", "p99")]
        estimates = [COLUMNS[column].estimate(figures) for column in names]
        axes.barh(["median", "p99"], [one.mean for one in estimates], 0.6, color=COLOURS[0])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        style(axes, title)
        axes.grid(axis="y", visible=False)
    return ChartImage(name, f"{result.stage.title}: {verdicts(result)[0]}.", figure)


def _bars(result: StageResult, targets: Sequence[BenchTarget], name: str, shown: Sequence[ChartPanel]) -> ChartImage:
    figure, panes = panels(len(shown), height=4.6)
    stage, colour, width = result.stage, colours(result.stage.targets), 0.84 / len(targets)
    for axes, panel in zip(panes, shown, strict=True):
        for number, target in enumerate(targets):
            for index in range(len(stage.loads)):
                if not (figures := result.figures(target.name, index)):
                    continue
                at = index + (number - (len(targets) - 1) / 2) * width
                look: dict[str, Any] = {"color": colour[target.name], "label": None if index else target.name}
                for column in panel.columns:
                    mean, low, high = COLUMNS[column].estimate(figures)
                    if panel.is_logarithmic:  # a bar would begin nowhere
                        axes.plot(at, mean, "o", markersize=5, **look)
                    else:
                        axes.bar(at, mean, width * 0.9, **look)
                    if math.isfinite(high - low) and "color" in look:
                        errors = [[mean - max(0.0, low)], [high - mean]]
                        axes.errorbar([at], [mean], yerr=errors, color=INK, linewidth=0.9, capsize=2)
                    look = {"fill": False, "edgecolor": colour[target.name], "linewidth": 1.1}
        names = stage.load_names or [""] * len(stage.loads)
        labels = [f"{name}\n{load}".strip() for name, load in zip(names, stage.loads, strict=True)]
        axes.set_xticks(range(len(stage.loads)), labels)
        _finish(axes, panel)
    legend_below(figure, panes[0])
    caption = (
        f"{stage.title}. Objective: first token within {stage.slo.ttft_s:g} s, {stage.slo.tpot_s * 1e3:g} ms per "
        "output token. Whiskers: 95 % confidence."
    )
    return ChartImage(name, caption, figure)


def _finish(axes: Axes, panel: ChartPanel) -> None:
    if panel.is_logarithmic:
        logarithmic(axes)
    else:
        axes.set_ylim(bottom=0)
    style(axes, panel.title, panel.note)
