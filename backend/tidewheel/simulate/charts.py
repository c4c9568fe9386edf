from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tidewheel.bench.charts import COLOURS, INK, MARKERS, ChartImage, logarithmic, panels, style
from tidewheel.simulate.outcomes import Figures, mean_in_system
from tidewheel.simulate.scenario import ScenarioResult


def charts(results: Sequence[ScenarioResult]) -> Iterator[ChartImage]:
    series: dict[str, list[ScenarioResult]] = {}
    for result in results:
        series.setdefault(result.policy, []).append(result)
    last = {policy: points[-1].figures for policy, points in series.items()}
    yield _throughput(series)
    if any(len(figures["classes"]) > 1 for figures in last.values()):
        yield _classes(last)
    if any(len(figures["tenants"]) > 1 for figures in last.values()):
        yield _fairness(last)
    if any(len(points) > 1 for points in series.values()):
        yield _queue(series)


def _throughput(series: Mapping[str, Sequence[ScenarioResult]]) -> ChartImage:
    figure, axes = _figure("Throughput against time to first token", "output tokens/s", "p99 TTFT, ms")
    for index, (name, results) in enumerate(series.items()):
        shown = [result.figures for result in results if result.figures["ttft_s"]["p99"]]
        x, y = [f["output_tokens_per_s"] for f in shown], [1e3 * f["ttft_s"]["p99"] for f in shown]
        axes.plot(x, y, marker=MARKERS[index % 9], label=name, color=_colour(index), alpha=0.85)
    return _finished("throughput_ttft", figure, axes)


def _classes(parts: Mapping[str, Figures]) -> ChartImage:
    classes = list(dict.fromkeys(name for figures in parts.values() for name in figures["classes"]))
    figure, panes = panels(len(classes), height=1.3 + 0.4 * len(parts), sharex=True)
    for column, (axes, name) in enumerate(zip(panes, classes, strict=True)):
        for row, figures in enumerate(parts.values()):
            ttft = figures["classes"].get(name, {}).get("ttft_s", {})
            found = [1e3 * ttft[quantile] for quantile in ("p50", "p99") if ttft.get(quantile)]
            y, colour = [row] * len(found), _colour(column)
            axes.plot(found, y, linewidth=2.5, color=colour)
            axes.plot(found[:1], y[:1], "o", markersize=6, color=colour)
            axes.plot(found[1:], y[1:], "|", markersize=11, markeredgewidth=2.5, color=colour)
        style(axes, name)
        axes.set_yticks(range(len(parts)), list(parts) if axes is panes[0] else [""] * len(parts))
        axes.set_ylim(len(parts) - 0.5, -0.5)
        axes.margins(x=0.1)
    for axes in panes:
        logarithmic(axes, "x")
    label = "time to first token, ms (logarithmic): from the median, a dot, to the p99"
    figure.supxlabel(label, fontsize=9)
    return ChartImage("classes", "Time to first token by class", figure)


def _fairness(parts: Mapping[str, Figures]) -> ChartImage:
    figure, axes = _figure("Served tokens by tenant while all of them ask", "", "share of the served tokens")
    tenants = list(dict.fromkeys(name for figures in parts.values() for name in figures["tenants"]))
    bottom = np.zeros(len(parts))
    for index, tenant in enumerate(tenants):
        found = [figures["tenants"].get(tenant, {}).get("served_share", 0.0) for figures in parts.values()]
        axes.bar(list(parts), found, 0.6, bottom=bottom, color=_colour(index), label=tenant or "none")
        bottom += np.array(found)
    for x, figures in enumerate(parts.values()):
        axes.text(x, 1.02, f"Jain {figures['fairness']:.2f}", ha="center", fontsize=9)
    axes.set_ylim(0, 1.12)
    return _finished("fairness", figure, axes, is_logarithmic=False)


def _queue(series: Mapping[str, Sequence[ScenarioResult]]) -> ChartImage:
    figure, axes = _figure("Queue length against load", "load, as a share of the capacity", "mean waiting requests")
    for index, (name, results) in enumerate(series.items()):
        points = [(r.load, max(r.figures["mean_waiting"], 1e-3)) for r in results if r.load is not None]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker=MARKERS[index % 9], color=_colour(index), label=name, alpha=0.85)
    loads = np.linspace(0.3, 0.96, 200)
    waiting = [mean_in_system(load) - load for load in loads]
    axes.plot(loads, waiting, color=INK, linestyle=":", label="M/M/1 (no batching)")
    return _finished("queue", figure, axes)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, (axes,) = panels(width=8.0)
    style(axes, title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _finished(name: str, figure: Figure, axes: Axes, *, is_logarithmic: bool = True) -> ChartImage:
    if is_logarithmic:
        logarithmic(axes)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right upper")
    return ChartImage(name, axes.get_title(loc="left"), figure)
