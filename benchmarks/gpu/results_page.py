"""Results as Markdown (objectives, figures by stage, and what is missing) and as pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu.measurements import OURS, Measurement
from gpu.objectives import Objective, objectives

OBJECTIVE_HEAD = ("point", "objective", "target", "measured", "")
RESULT_HEAD = ("what", "case", "who", "value", "of the limit", "samples")
# Okabe and Ito's colours, for any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#555555", "#882255")
WIDTH, BAR_HEIGHT = 11.0, 0.13  # inches
GAP = 0.6  # between groups, in bars


def markdown(result: dict[str, Any], measurements: Sequence[tuple[str, Measurement]], plots: Sequence[str]) -> str:
    parts = [_head(result)]
    if not result["dry_run"]:
        parts.append(_table("Objectives", OBJECTIVE_HEAD, _objective_rows(objectives([m for _, m in measurements]))))
    parts += [f"![{name}]({name})" for name in plots]
    stages = [stage["name"] for stage in result["stages"]]
    parts.append(_table("Stages", ("stage", "seconds", "outcome"), [tuple(s.values()) for s in result["stages"]]))
    for name in dict.fromkeys((*(stage for stage, _ in measurements), *stages)):
        rows = [_row(m) for stage, m in measurements if stage == name]
        if rows:
            parts.append(_table(name, RESULT_HEAD, rows))
    for title, key, detail in (("Failed", "failed", "error"), ("Not measured", "skipped", "reason")):
        rows = [(r["stage"], r["what"], _one_line(r[detail])) for r in result["records"] if r["type"] == key]
        if rows:
            parts.append(_table(title, ("stage", "what", "why"), rows))
    return "\n\n".join(parts) + "\n"


def _head(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    title = "# Dry run: no measurement" if result["dry_run"] else f"# Speed on {machine['gpu'] or 'no GPU'}"
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    facts = (
        f"Commit {result['commit']}, {result['started']}, {machine['processor']}, {machine['cores']} cores; {shown}."
    )
    return f"{title}\n\n{facts}\n\n`{result['command']}`"


def _objective_rows(found: Iterable[Objective]) -> list[tuple[object, ...]]:
    return [
        (
            one.point,
            one.what,
            f"{'at least' if one.at_least else 'at most'} {one.target:g} {one.unit}",
            "" if one.found is None else f"{one.found:.3g}",
            one.verdict,
        )
        for one in found
    ]


def _row(one: Measurement) -> tuple[object, ...]:
    percent = "" if one.percent is None else f"{one.percent:.1f} %"
    return (one.name, one.case, one.who, f"{one.value:.4g} {one.unit}", percent, len(one.samples))


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _one_line(text: str, limit: int = 300) -> str:
    return " ".join(text.split())[:limit]


def draw(measurements: Sequence[Measurement], folder: Path) -> list[str]:
    """Return the names of written files."""
    pictures: dict[str, Callable[[Sequence[Measurement], Path], bool]] = {
        "kernels.png": _kernels,
        "decode_steps.png": _decode_steps,
        "engines.png": _engines,
    }
    return [name for name, plot in pictures.items() if plot(measurements, folder / name)]


def _kernels(measurements: Sequence[Measurement], path: Path) -> bool:
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
    from matplotlib.figure import Figure

    if not values:
        return False
    who = sorted(set(owners), key=lambda name: (name != OURS, name))
    groups = {label: {name: value for one, name, value in zip(labels, owners, values, strict=True) if one == label}
              for label in dict.fromkeys(labels)}  # fmt: skip
    heights: dict[str, list[tuple[float, float]]] = {name: [] for name in who}
    ticks: list[float] = []
    row = 0.0
    for group in groups.values():
        ticks.append(row + (len(group) - 1) / 2)
        for name in who:
            if name in group:
                heights[name].append((row, group[name]))
                row += 1.0
        row += GAP
    figure = Figure(figsize=(WIDTH, 1.5 + BAR_HEIGHT * row), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(who):
        at, widths = zip(*heights[name], strict=True)
        axes.barh(at, widths, 0.9, label=name, color=COLOURS[number % len(COLOURS)])
    axes.set_yticks(ticks, list(groups), fontsize=6)
    axes.set_ylim(row, -1.0)
    axes.set_xlabel(axis)
    axes.set_title(title)
    if mark is not None:
        axes.axvline(mark, color="#222222", linewidth=0.8)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return True


def _decode_steps(measurements: Sequence[Measurement], path: Path) -> bool:
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
