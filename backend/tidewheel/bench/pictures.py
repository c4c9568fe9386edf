"""Plots of results, drawn without a display."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tidewheel.bench import BenchError
from tidewheel.bench.estimates import UNKNOWN, Estimate
from tidewheel.bench.knee import knee_of
from tidewheel.bench.results import StageResult
from tidewheel.bench.stage import Stage

# Okabe and Ito's colours, for any colour vision; grey is for baselines.
_OURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7")
_PEERS = ("#D55E00", "#882255", "#F0C000", "#44AA99")
_BASELINES = ("#555555", "#999999")
_INK, _GRID = "#222222", "#DDDDDD"
_MARKERS = "osD^vPX<>"
_MOST_DECADES = 2.3


class Picture(NamedTuple):
    name: str
    caption: str
    figure: Figure

    def svg(self) -> bytes:
        return self._saved("svg")

    def png(self) -> bytes:
        return self._saved("png")

    def _saved(self, kind: str) -> bytes:
        buffer = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {}
        self.figure.savefig(buffer, format=kind, dpi=160, facecolor="white", metadata=metadata)
        return buffer.getvalue()


def pictures(result: StageResult) -> list[Picture]:
    loads, name = result.stage.loads, result.stage.name.replace(" ", "_")
    measured = [t.name for t in result.stage.targets if any(result.figures(t.name, i) for i in range(len(loads)))]
    if len(measured) * len(loads) < 2:
        return []
    if all(load.kind == "closed" for load in loads) and len(loads) >= 3:
        return [_over_batch_size(result, measured, name)]
    if all(load.rate is not None for load in loads) and len(loads) > 3:
        return [_over_rate(result, measured, name), _distributions(result, measured, name)]
    return [_bars(result, measured, name), _distributions(result, measured, name)]


def colours(result: StageResult) -> dict[str, str]:
    """Return a colour per target, the same in all plots."""
    pools = {"ours": iter(_OURS), "baseline": iter(_BASELINES)}
    others = iter(_PEERS * 8)
    return {
        target.name: next(pools.get(target.kind, others), "#000000")
        for target in sorted(result.stage.targets, key=lambda t: t.name != "continuous")
    }


def _bars(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    figures = {(t, i): result.figures(t, i) for t in targets for i in range(len(result.stage.loads))}
    whole = {k: f.get("goodput_e2e_per_s") for k, f in figures.items()}
    _grouped(panels[0], result, targets, whole, is_outline=True)
    _grouped(panels[0], result, targets, {k: f.get("goodput_per_s") for k, f in figures.items()})
    _title(panels[0], "Goodput, requests/s", "within the objective; outline: judged by the whole answer")
    p99 = {k: f["ttft_s"]["p99"] if f else None for k, f in figures.items()}
    _grouped(panels[1], result, targets, p99, scale=1e3, is_logarithmic=True)
    _title(panels[1], "Time to first token, p99, ms", "logarithmic: less is better")
    _grouped(panels[2], result, targets, {k: f.get("output_tokens_per_s") for k, f in figures.items()})
    _title(panels[2], "Output, tokens/s", "more is better")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), frameon=False, fontsize=9)
    slo = result.stage.slo
    caption = (
        f"{result.stage.title}. Objective: first token within {slo.ttft_s:g} s, {slo.tpot_s * 1e3:g} ms per output "
        "token. Whiskers: 95 % confidence."
    )
    return Picture(name, caption, figure)


def _grouped(
    axes: Axes,
    result: StageResult,
    targets: Sequence[str],
    values: dict[tuple[str, int], Estimate | None],
    scale: float = 1.0,
    *,
    is_logarithmic: bool = False,
    is_outline: bool = False,
) -> None:
    colour, width = colours(result), 0.84 / len(targets)
    num_loads = len(result.stage.loads)
    heights_of_all: list[float] = []
    for number, target in enumerate(targets):
        places = [index + (number - (len(targets) - 1) / 2) * width for index in range(num_loads)]
        estimates = [values.get((target, index)) or UNKNOWN for index in range(num_loads)]
        heights = [estimate.mean * scale for estimate in estimates]
        heights_of_all += heights
        if is_outline:
            axes.bar(places, heights, width * 0.9, fill=False, edgecolor=colour[target], linewidth=1.1)
            continue
        axes.bar(places, heights, width * 0.9, color=colour[target], label=target)
        _whiskers(axes, places, estimates, scale)
    axes.set_xticks(range(num_loads), [_load_label(result.stage, index) for index in range(num_loads)])
    if is_logarithmic:
        axes.set_yscale("log")
        _readable(axes.yaxis)
    else:  # wide intervals would squash the bars
        highest = 1.4 * max((height for height in heights_of_all if height > 0), default=1.0)
        axes.set_ylim(0, highest if is_outline else max(highest, axes.get_ylim()[1] if axes.patches else 0.0))


def _load_label(stage: Stage, index: int) -> str:
    name = stage.load_names[index] if stage.load_names else ""
    return f"{name}\n{stage.loads[index]}" if name else str(stage.loads[index])


def _whiskers(axes: Axes, places: Sequence[float], estimates: Sequence[Estimate], scale: float) -> None:
    for place, (mean, low, high) in zip(places, estimates, strict=True):
        if all(map(math.isfinite, (mean, low, high))):
            errors = [[(mean - max(0.0, low)) * scale], [(high - mean) * scale]]
            axes.errorbar([place], [mean * scale], yerr=errors, color=_INK, linewidth=0.9, capsize=2)


def _over_rate(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    rates = [load.rate or 0.0 for load in result.stage.loads]
    indices = range(len(rates))
    for target, marker in zip(targets, _MARKERS * 8, strict=False):
        line: Any = {"color": colours(result)[target], "marker": marker, "markersize": 5, "label": target}
        series = [result.figures(target, index) for index in indices]
        panels[0].plot(rates, [f["goodput_per_s"].mean if f else math.nan for f in series], **line)
        for panel, latency in zip(panels[1:], ("ttft_s", "e2e_s"), strict=True):
            values = [f[latency]["p99"].mean * 1e3 if f else math.nan for f in series]
            panel.plot(rates, values, **line)
        with contextlib.suppress(BenchError):  # no knee
            at = knee_of(result, target).load
            panels[2].plot(rates[at], series[at]["e2e_s"]["p99"].mean * 1e3, "o", mfc="none", mec=_INK, ms=14)
    panels[0].plot(rates, rates, color=_GRID, zorder=0, label="offered")
    _title(panels[0], "Goodput, requests/s", "within the objective")
    _title(panels[1], "Time to first token, p99, ms", "logarithmic")
    _title(panels[2], "Whole answer, p99, ms", "logarithmic; circle: the knee")
    for panel in panels:
        panel.set_xlabel("offered, requests/s")
    for panel in panels[1:]:
        panel.set_yscale("log")
        _readable(panel.yaxis)
    panels[0].legend(frameon=False, fontsize=9)
    return Picture(name, f"{result.stage.title}. The knee is found by Kneedle (Satopää and others, 2011).", figure)


def _over_batch_size(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    sizes = [load.value for load in result.stage.loads]
    series = {target: [result.figures(target, index) for index in range(len(sizes))] for target in targets}
    is_streamed = any(f and math.isfinite(f["tpot_s"]["p50"].mean) for line in series.values() for f in line)
    latency = "tpot_s" if is_streamed else "e2e_s"
    is_busy_known = any(f and "device_busy" in f["server"] for line in series.values() for f in line)
    server, scale = ("device_busy", 100.0) if is_busy_known else ("batch_size", 1.0)
    for target, marker in zip(targets, _MARKERS * 8, strict=False):
        line: Any = {"color": colours(result)[target], "marker": marker, "markersize": 5}
        speeds = [f["output_tokens_per_s"].mean if f else math.nan for f in series[target]]
        panels[0].plot(sizes, speeds, label=target, **line)
        for quantile, style in (("p50", "-"), ("p99", "--")):
            values = [f[latency][quantile].mean * 1e3 if f else math.nan for f in series[target]]
            panels[1].plot(sizes, values, style, label=f"{target} {quantile}", **line)
        values = [f["server"].get(server, math.nan) * scale if f else math.nan for f in series[target]]
        panels[2].plot(sizes, values, label=target, **line)
        with contextlib.suppress(BenchError):  # no knee
            at = knee_of(result, target).load
            panels[0].plot(sizes[at], speeds[at], "o", mfc="none", mec=_INK, ms=14)
    _title(panels[0], "Output, tokens/s", "circle: the knee of latency over requests/s")
    _title(panels[1], "Time per output token, ms" if is_streamed else "Whole answer, ms", "less is better")
    if is_busy_known:
        _title(panels[2], "Engine busy, %", "time in steps over time")
    else:
        _title(panels[2], "Batch, requests", "a step, or an execution of Triton's")
    for panel in panels:
        panel.set_ylim(bottom=0)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.set_xlabel("requests in flight")
    panels[1].legend(frameon=False, fontsize=9)
    return Picture(name, f"{result.stage.title}. The knee is found by Kneedle (Satopää and others, 2011).", figure)


def _distributions(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    count = len(result.stage.loads)
    shown = sorted({0, count // 2, count - 1})
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, sharex=True)[0]
    for panel, index in zip(panels, shown, strict=True):
        for target in targets:
            outcomes = [o for repeat in result.outcomes(target, index) for o in repeat]
            times = sorted(o.first_token * 1e3 for o in outcomes if o.first_token is not None)
            if times:
                shares = [(rank + 1) / len(outcomes) for rank in range(len(times))]
                panel.step(times, shares, where="post", color=colours(result)[target], linewidth=1.6, label=target)
        panel.axvline(result.stage.slo.ttft_s * 1e3, color=_INK, linewidth=0.8, linestyle=":")
        panel.set_xscale("log")
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("ms, logarithmic")
        _title(panel, f"First token within …, {result.stage.loads[index]}", "dotted: the objective")
    _readable(panels[0].xaxis)  # shared
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), frameon=False, fontsize=9)
    return Picture(f"{name}_ttft", "Share of requests that had their first token by then.", figure)


def _readable(axis: Axis) -> None:
    """Label 1, 2 and 5 of each decade, or only 1 over a wide range."""
    low, high = axis.get_view_interval()
    is_wide = low > 0 and math.log10(high / low) > _MOST_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _title(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=18, fontweight="bold")
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=9, color="#666666")
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#888888")
    axes.tick_params(colors=_INK, labelsize=9)
