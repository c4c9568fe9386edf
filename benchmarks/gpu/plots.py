"""Pictures of the results: kernels against ceilings, decode steps against limits, engines side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu.values import OURS, Measurement

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#555555", "#882255")
WIDTH, ROW_HEIGHT = 11.0, 0.22


def draw(measurements: Sequence[Measurement], folder: Path) -> list[str]:
    """Names of the files that were written; none for what was not measured."""
    pictures: dict[str, Callable[[Sequence[Measurement], Path], bool]] = {
        "kernels.png": _kernels,
        "decode_steps.png": _decode_steps,
        "engines.png": _engines,
    }
    return [name for name, plot in pictures.items() if plot(measurements, folder / name)]


def _kernels(measurements: Sequence[Measurement], path: Path) -> bool:
    """Percent of the measured ceiling."""
    units = ("GB/s", "TFLOP/s")
    kernels = [m for m in measurements if m.unit in units and m.percent is not None]
    labels = [f"{m.name}, {m.case}" for m in kernels]
    title = "Kernels: percent of this device's copy bandwidth or matrix arithmetic"
    values = [m.percent or 0.0 for m in kernels]
    return _bars(path, title, "percent of the ceiling", labels, [m.who for m in kernels], values, mark=100.0)


def _engines(measurements: Sequence[Measurement], path: Path) -> bool:
    names = ("engine throughput", "streamed tokens", "preemption")
    runs = [m for m in measurements if m.name in names]
    labels = [f"{m.name}, {m.case}" for m in runs]
    return _bars(path, "Engines", "output tokens per second", labels, [m.who for m in runs], [m.value for m in runs])


def _bars(
    path: Path,
    title: str,
    axis: str,
    labels: Sequence[str],
    owners: Sequence[str],
    values: Sequence[float],
    mark: float | None = None,
) -> bool:
    """A row for each label, a bar in it for each owner."""
    from matplotlib.figure import Figure

    if not values:
        return False
    rows, who = list(dict.fromkeys(labels)), sorted(set(owners), key=lambda name: (name != OURS, name))
    thickness = 0.8 / len(who)
    figure = Figure(figsize=(WIDTH, 1.5 + ROW_HEIGHT * len(rows) * max(1.0, 0.6 * len(who))), layout="constrained")
    axes = figure.subplots()
    for number, owner in enumerate(who):
        mine = [
            (rows.index(label) + number * thickness, value)
            for label, name, value in zip(labels, owners, values, strict=True)
            if name == owner
        ]
        colour = COLOURS[number % len(COLOURS)]
        axes.barh([at for at, _ in mine], [value for _, value in mine], thickness, label=owner, color=colour)
    axes.set_yticks([index + 0.4 - thickness / 2 for index in range(len(rows))], rows, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.set_title(title)
    if mark is not None:
        axes.axvline(mark, color="#222222", linewidth=0.8)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return True


def _decode_steps(measurements: Sequence[Measurement], path: Path) -> bool:
    """Milliseconds of a decode step over the batch size, with the limits as dashed lines."""
    from matplotlib.figure import Figure

    steps = [m for m in measurements if m.name == "decode step" and "batch" in m.details]
    models = list(dict.fromkeys(m.details["model"] for m in steps))
    if not steps:
        return False
    figure = Figure(figsize=(WIDTH, 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        mine = [m for m in steps if m.details["model"] == model]
        for number, context in enumerate(dict.fromkeys(m.details["context"] for m in mine)):
            line = sorted((m for m in mine if m.details["context"] == context), key=lambda m: m.details["batch"])
            batches, colour = [m.details["batch"] for m in line], COLOURS[number % len(COLOURS)]
            axes.plot(batches, [m.value for m in line], "o-", color=colour, label=f"context {context}")
            axes.plot(batches, [m.limit or 0.0 for m in line], "--", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("batch size")
        axes.set_ylabel("decode step, ms (dashed: physical limit)")
        axes.set_title(re.sub(r"[^\w.-]", " ", model))
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return True
