"""Pictures of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from tidewheel.bench.capacity import GOAL, WHOLE_ANSWER
from tidewheel.bench.charts import (
    COLOURS,
    GREYS,
    INK,
    MARKERS,
    Picture,
    legend_below,
    logarithmic,
    panels,
    style,
)  # fmt: skip
from tidewheel.bench.estimates import UNKNOWN, Estimate
from tidewheel.bench.results import StageResult
from tidewheel.bench.targets import Target

Values = dict[tuple[str, int], Estimate | None]


def pictures(result: StageResult) -> list[Picture]:
    loads, name = result.stage.loads, result.stage.name.replace(" ", "_")
    measured = [t.name for t in result.stage.targets if any(result.figures(t.name, i) for i in range(len(loads)))]
    if len(measured) * len(loads) < 2 or result.stage.is_preliminary:
        return []
    if all(load.kind == "closed" for load in loads) and len(loads) >= 3:
        return [_over_batch_size(result, measured, name)]
    if result.stage.longest_s is not None:
        return [_over_rate(result, measured, f"{name}_rates")]
    if all(load.rate is not None for load in loads) and len(loads) > 3:
        return [_over_rate(result, measured, name), _distributions(result, measured, name)]
    return [_bars(result, measured, name), _distributions(result, measured, name)]


def capacity_picture(findings: Mapping[str, Any], targets: Sequence[Target]) -> Picture:
    """Draw the capacities of `capacity_findings` as bars, from the largest."""
    found = findings["capacities"]
    order = sorted(found[WHOLE_ANSWER], key=lambda name: float(found[WHOLE_ANSWER][name]["per_s"]))
    figure, (axes,) = panels(height=1.6 + 0.42 * len(order), width=9.5)
    colour, width = colours(targets), 0.8 / len(found)
    for number, capacities in enumerate(found.values()):
        for row, target in enumerate(order):
            if (one := capacities.get(target)) is None:
                continue
            at, (low, high) = row + (0.5 - number) * width * (len(found) > 1), one["bracket"]
            high = high if math.isfinite(high) else one["per_s"]
            look: dict[str, Any] = {"color": colour[target]} if not number else {"fill": False, "ec": colour[target]}
            axes.barh(at, one["per_s"], width * 0.9, **look)
            axes.plot([low, high], [at, at], color=INK, linewidth=0.9, marker="|", markersize=5)
            ratio = f"   {one['ratio'][0]:.1f}x" if one["ratio"] and target != findings["reference"] else ""
            axes.annotate(f"{one['per_s']:.3g}{ratio}", (max(high, one["per_s"]), at), (5, 0), va="center",
                          textcoords="offset points", fontsize=8.5, color=INK)  # fmt: skip
    axes.set_yticks(range(len(order)), order)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    objective = findings["objective"]
    style(axes, "Capacity, requests/s", f"{GOAL:.0%} of whole answers within the objective; outline: of streams")
    axes.grid(axis="y", visible=False)
    caption = (
        f"Highest rate of Poisson arrivals at which {GOAL:.0%} of requests meet the objective: by the whole answer, "
        f"{objective['ttft_s']:g} s and {objective['tpot_s'] * 1e3:g} ms a token together; as a stream, each by "
        f"itself. Lines: the bracket. x: over {findings['reference']}."
    )
    return Picture("capacity", caption, figure)


def colours(targets: Sequence[Target]) -> dict[str, str]:
    """Return a colour per target, the same in all pictures."""
    ordered = sorted(targets, key=lambda target: (target.kind != "ours", target.name != "continuous"))
    greys, others = iter(GREYS * len(targets)), iter(COLOURS * len(targets))
    return {target.name: next(greys if target.kind == "baseline" else others) for target in ordered}


def _bars(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure, axes = panels(3, height=4.6)
    figures = {(t, i): result.figures(t, i) for t in targets for i in range(len(result.stage.loads))}
    whole = {k: f.get("goodput_e2e_per_s") for k, f in figures.items()}
    _grouped(axes[0], result, targets, whole, is_outline=True)
    _grouped(axes[0], result, targets, {k: f.get("goodput_per_s") for k, f in figures.items()})
    style(axes[0], "Goodput, requests/s", "within the objective; outline: judged by the whole answer")
    p99 = {k: f["ttft_s"]["p99"] if f else None for k, f in figures.items()}
    _grouped(axes[1], result, targets, p99, scale=1e3, is_logarithmic=True)
    style(axes[1], "Time to first token, p99, ms", "logarithmic: less is better")
    _grouped(axes[2], result, targets, {k: f.get("output_tokens_per_s") for k, f in figures.items()})
    style(axes[2], "Output, tokens/s", "more is better")
    legend_below(figure, axes[0])
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
    values: Values,
    scale: float = 1.0,
    *,
    is_logarithmic: bool = False,
    is_outline: bool = False,
) -> None:
    colour, width, num_loads = colours(result.stage.targets), 0.84 / len(targets), len(result.stage.loads)
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
    names = result.stage.load_names or [""] * num_loads
    labels = [f"{name}\n{load}".strip() for name, load in zip(names, result.stage.loads, strict=True)]
    axes.set_xticks(range(num_loads), labels)
    if is_logarithmic:
        logarithmic(axes)
    else:  # wide intervals would squash the bars
        highest = 1.4 * max((height for height in heights_of_all if height > 0), default=1.0)
        axes.set_ylim(0, highest if is_outline else max(highest, axes.get_ylim()[1] if axes.patches else 0.0))


def _whiskers(axes: Axes, places: Sequence[float], estimates: Sequence[Estimate], scale: float) -> None:
    for place, (mean, low, high) in zip(places, estimates, strict=True):
        if all(map(math.isfinite, (mean, low, high))):
            errors = [[(mean - max(0.0, low)) * scale], [(high - mean) * scale]]
            axes.errorbar([place], [mean * scale], yerr=errors, color=INK, linewidth=0.9, capsize=2)


def _over_rate(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure, axes = panels(3)
    for target, line in _lines(result, targets):
        points = [(load.rate, result.figures(target, index)) for index, load in enumerate(result.stage.loads)]
        rates, figures = zip(*[(rate, f) for rate, f in points if f], strict=True)
        axes[0].plot(rates, [f["e2e_attainment"].mean * 100 for f in figures], label=target, **line)
        for panel, latency in zip(axes[1:], ("ttft_s", "e2e_s"), strict=True):
            panel.plot(rates, [f[latency]["p99"].mean * 1e3 for f in figures], **line)
    axes[0].axhline(GOAL * 100, color=INK, linewidth=0.8, linestyle=":")
    axes[0].set_ylim(0, 104)
    style(axes[0], "Within the objective, %", f"by the whole answer; dotted: {GOAL:.0%}")
    style(axes[1], "Time to first token, p99, ms", "logarithmic")
    style(axes[2], "Whole answer, p99, ms", "logarithmic")
    for panel in axes:
        logarithmic(panel, "x")
        panel.set_xlabel("offered, requests/s, logarithmic")
    for panel in axes[1:]:
        logarithmic(panel)
    legend_below(figure, axes[0])
    return Picture(name, f"{result.stage.title}: what was measured over the rates that were offered.", figure)


def _over_batch_size(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    figure, axes = panels(3)
    sizes = [load.value for load in result.stage.loads]
    series = {target: [result.figures(target, index) for index in range(len(sizes))] for target in targets}
    is_streamed = any(f and math.isfinite(f["tpot_s"]["p50"].mean) for line in series.values() for f in line)
    latency = "tpot_s" if is_streamed else "e2e_s"
    is_busy_known = any(f and "device_busy" in f["server"] for line in series.values() for f in line)
    server, scale = ("device_busy", 100.0) if is_busy_known else ("batch_size", 1.0)
    for target, line in _lines(result, targets):
        speeds = [f["output_tokens_per_s"].mean if f else math.nan for f in series[target]]
        axes[0].plot(sizes, speeds, label=target, **line)
        for quantile, dashes in (("p50", "-"), ("p99", "--")):
            values = [f[latency][quantile].mean * 1e3 if f else math.nan for f in series[target]]
            axes[1].plot(sizes, values, dashes, label=f"{target} {quantile}", **line)
        values = [f["server"].get(server, math.nan) * scale if f else math.nan for f in series[target]]
        axes[2].plot(sizes, values, label=target, **line)
    style(axes[0], "Output, tokens/s", "more is better")
    style(axes[1], "Time per output token, ms" if is_streamed else "Whole answer, ms", "less is better")
    if is_busy_known:
        style(axes[2], "Engine busy, %", "time in steps over time")
    else:
        style(axes[2], "Batch, requests", "a step, or an execution of Triton's")
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.set_xlabel("requests in flight")
    axes[1].legend(frameon=False, fontsize=9)
    return Picture(name, f"{result.stage.title}.", figure)


def _distributions(result: StageResult, targets: Sequence[str], name: str) -> Picture:
    count, colour = len(result.stage.loads), colours(result.stage.targets)
    shown = sorted({0, count // 2, count - 1})
    figure, axes = panels(len(shown), height=4.2, sharex=True)
    for panel, index in zip(axes, shown, strict=True):
        for target in targets:
            outcomes = [o for repeat in result.outcomes(target, index) for o in repeat]
            times = sorted(o.first_token * 1e3 for o in outcomes if o.first_token is not None)
            if times:
                shares = [(rank + 1) / len(outcomes) for rank in range(len(times))]
                panel.step(times, shares, where="post", color=colour[target], linewidth=1.6, label=target)
        panel.axvline(result.stage.slo.ttft_s * 1e3, color=INK, linewidth=0.8, linestyle=":")
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("ms, logarithmic")
        style(panel, f"First token within …, {result.stage.loads[index]}", "dotted: the objective")
    logarithmic(axes[0], "x")  # shared
    legend_below(figure, axes[0])
    return Picture(f"{name}_ttft", "Share of requests that had their first token by then.", figure)


def _lines(result: StageResult, targets: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    colour = colours(result.stage.targets)
    return [
        (target, {"color": colour[target], "marker": marker, "markersize": 5})
        for target, marker in zip(targets, MARKERS * len(targets), strict=False)
    ]
