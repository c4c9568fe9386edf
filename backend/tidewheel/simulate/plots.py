"""Plots of simulated runs; only they need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.simulate.queueing import mg1_mean_in_system, mm1_mean_in_system
from tidewheel.simulate.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vP"
_COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#3b7a57", "#6a4c93", "#8a8a8a")


class Knee(NamedTuple):
    """Mean number in the system by load, for one service time distribution."""

    name: str
    service_scv: float  # squared coefficient of variation
    loads: Sequence[float]
    mean_in_system: Sequence[float]


def plot_throughput(series: Mapping[str, Sequence[Report]], path: Path) -> None:
    figure, axes = _figure()
    for (name, reports), (colour, marker) in zip(series.items(), _styles(len(series)), strict=True):
        points = [(r["output_tokens_per_s"], 1e3 * r["ttft_s"]["p99"]) for r in reports if r["ttft_s"]["p99"]]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name, color=colour, linewidth=1.6, alpha=0.85)
    axes.set_yscale("log")
    axes.set_xlabel("output tokens per second")
    axes.set_ylabel("TTFT p99 [ms]")
    axes.set_title("Throughput against time to first token")
    _finish(figure, axes, path)


def plot_classes(reports: Mapping[str, Report], path: Path) -> None:
    figure, axes = _figure()
    classes = list(dict.fromkeys(name for report in reports.values() for name in report["classes"]))
    width = 0.8 / len(classes)
    for index, name in enumerate(classes):
        parts = [report["classes"].get(name) for report in reports.values()]
        x = np.arange(len(parts)) + (index - (len(classes) - 1) / 2) * width
        medians, tails = ([_milliseconds(part, key) for part in parts] for key in ("p50", "p99"))
        axes.bar(x, tails, width * 0.92, color=_COLOURS[index], alpha=0.35)
        axes.bar(x, medians, width * 0.92, color=_COLOURS[index], label=name)
    axes.set_yscale("log")
    axes.set_xticks(np.arange(len(reports)), list(reports))
    axes.set_ylabel("TTFT [ms]: p50 (full), p99 (pale)")
    axes.set_title("Time to first token by class")
    _finish(figure, axes, path)


def plot_fairness(reports: Mapping[str, Report], path: Path) -> None:
    figure, axes = _figure()
    tenants = list(dict.fromkeys(name for report in reports.values() for name in report["tenants"]))
    bottom = np.zeros(len(reports))
    for index, tenant in enumerate(tenants):
        shares = np.array([report["tenants"].get(tenant, {}).get("served_share", 0.0) for report in reports.values()])
        axes.bar(list(reports), shares, 0.6, bottom=bottom, color=_COLOURS[index % 6], label=tenant or "none")
        bottom += shares
    for x, report in enumerate(reports.values()):
        axes.text(x, 1.02, f"Jain {report['fairness']:.2f}", ha="center", fontsize=9)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("share of the served tokens")
    axes.set_title("Served tokens by tenant while all of them ask")
    _finish(figure, axes, path)


def plot_knee(knees: Sequence[Knee], path: Path) -> None:
    figure, axes = _figure()
    loads = np.linspace(0.5, 0.96, 200)
    axes.plot(loads, [mm1_mean_in_system(load) for load in loads], color="#444444", linestyle=":", label="M/M/1")
    for knee, colour in zip(knees, _COLOURS, strict=False):
        formula = [mg1_mean_in_system(load, knee.service_scv) for load in loads]
        axes.plot(loads, formula, color=colour, linewidth=1.2, label=f"M/G/1, {knee.name}")
        axes.plot(knee.loads, knee.mean_in_system, "o", color=colour, markersize=7, label=f"simulated, {knee.name}")
    axes.set_yscale("log")
    axes.set_xlabel("load")
    axes.set_ylabel("mean number of requests in the system")
    axes.set_title("One server: simulated queue, and Pollaczek-Khinchine")
    _finish(figure, axes, path)


def plot_queue(series: Mapping[str, Sequence[tuple[float, Report]]], path: Path) -> None:
    figure, axes = _figure()
    for (name, points), (colour, marker) in zip(series.items(), _styles(len(series)), strict=True):
        x = [load for load, _ in points]
        y = [max(report["mean_waiting"], 1e-3) for _, report in points]
        axes.plot(x, y, marker=marker, color=colour, label=name, alpha=0.85)
    loads = np.linspace(0.3, 0.96, 200)
    waiting = [mm1_mean_in_system(load) - load for load in loads]
    axes.plot(loads, waiting, color="#444444", linestyle=":", label="M/M/1 (no batching)")
    axes.set_yscale("log")
    axes.set_xlabel("load, as a share of the capacity")
    axes.set_ylabel("mean number of waiting requests")
    axes.set_title("Queue length against load")
    _finish(figure, axes, path)


def _styles(count: int) -> list[tuple[str, str]]:
    """Return colours and markers; markers tell overlapping lines apart."""
    return [(_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]) for index in range(count)]


def _milliseconds(part: Report | None, key: str) -> float:
    value = part["ttft_s"][key] if part else None
    return 0.0 if value is None else 1e3 * float(value)


def _figure() -> tuple[Figure, Axes]:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'tidewheel[load]', or leave --plots out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.4), dpi=130, layout="constrained")
    axes.grid(visible=True, which="major", axis="y", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right upper")
    figure.savefig(path)
    pyplot.close(figure)
