"""Results as Markdown (objectives, figures by stage, and what is missing) and as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.measurements import OURS, Ceilings, Measurement
from tidewheel.bench.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpu.objectives import Objective

OBJECTIVE_HEAD = ("point", "objective", "measured", "limit", "goal", "estimate", "")
RESULT_HEAD = ("what", "case", "who", "value", "of the limit", "samples")
WIDTH, BAR_HEIGHT = 11.0, 0.13  # inches
GAP = 0.6  # between groups, in bars


def markdown(
    result: dict[str, Any],
    measurements: Sequence[tuple[str, Measurement]],
    plots: Sequence[str],
    device: Ceilings,
) -> str:
    parts = [_head(result)]
    if result["fallback"]:
        parts.append(f"**The engine failed as it is set by default; what helped: {result['fallback']}.**")
    if not result["dry_run"]:
        parts += _objectives([measurement for _, measurement in measurements], device)
    parts += [f"![{name}]({name})" for name in plots]
    stages = [stage["name"] for stage in result["stages"]]
    parts.append(
        _table("Stages", ("stage", "seconds", "outcome"), [list(map(str, s.values())) for s in result["stages"]])
    )
    for name in dict.fromkeys((*(stage for stage, _ in measurements), *stages)):
        rows = [_row(m) for stage, m in measurements if stage == name]
        if rows:
            parts.append(_table(name, RESULT_HEAD, rows))
    for title, key, detail in (("Failed", "failed", "error"), ("Not measured", "skipped", "reason")):
        rows = [[r["stage"], r["what"], _one_line(r[detail])] for r in result["records"] if r["type"] == key]
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


def _objectives(measurements: Sequence[Measurement], device: Ceilings) -> list[str]:
    """Return the farthest misses, then all objectives; one line if the model behind estimates cannot be imported."""
    try:
        from gpu.objectives import largest_differences, objectives
    except ImportError as error:
        return [f"No objectives and estimates: {error}"]
    found = objectives(measurements, device)
    missed = _table("Where to look next", OBJECTIVE_HEAD, _objective_rows(largest_differences(found)))
    return [missed, _table("Objectives", OBJECTIVE_HEAD, _objective_rows(found))]


def _objective_rows(found: Iterable[Objective]) -> list[list[str]]:
    return [
        [
            str(one.point),
            one.what,
            "" if one.found is None else f"{one.found:.3g}",
            "" if one.limit is None else f"{one.limit:.3g}",
            f"{'at least' if one.at_least else 'at most'} {one.target:.3g} {one.unit}",
            "" if one.estimate is None else str(one.estimate),
            f"{one.verdict}, {one.times_apart:.2f} times" if one.verdict == "MISSED" else one.verdict,
        ]
        for one in found
    ]


def _row(one: Measurement) -> list[str]:
    percent = "" if one.percent is None else f"{one.percent:.1f} %"
    return [one.name, one.case, one.who, f"{one.value:.4g} {one.unit}", percent, str(len(one.samples))]


def _table(title: str, header: Sequence[str], rows: list[list[str]]) -> str:
    return f"## {title}\n\n{TextTable(list(header), rows).as_markdown()}"


def _one_line(text: str, limit: int = 300) -> str:
    return " ".join(text.split())[:limit]


def draw(measurements: Sequence[Measurement], folder: Path) -> list[str]:
    """Draw with matplotlib; return the names of written files."""
    shown = [m for m in measurements if m.unit in ("GB/s", "TFLOP/s") and m.percent is not None]
    kernels = [(f"{m.name}, {m.case}", m.who, m.percent or 0.0) for m in shown]
    shown = [m for m in measurements if m.name in ("engine throughput", "streamed tokens", "preemption")]
    is_compared = any(m.name == "engine throughput" and not m.who.startswith(OURS) for m in shown)
    shown = shown if is_compared else []
    engines = [(f"{m.name}, {m.case}", m.who, m.value) for m in shown]
    limit = "percent of this device's copy bandwidth or matrix arithmetic"
    pictures = {
        "kernels.png": _bars("Kernels", limit, kernels) if kernels else None,
        "decode_steps.png": _decode_steps([m for m in measurements if m.name == "decode step"]),
        "engines.png": _bars("Engines", "output tokens per second", engines) if engines else None,
    }
    for name, figure in pictures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=110)
    return [name for name, figure in pictures.items() if figure is not None]


def _bars(title: str, axis: str, bars: Sequence[tuple[str, str, float]]) -> Figure:
    """Draw bars (label, who, value) in groups of one label."""
    from tidewheel.bench import charts

    owners = sorted({who for _, who, _ in bars}, key=lambda name: (name != OURS, name))
    groups: dict[str, dict[str, float]] = {}
    for label, who, value in bars:
        groups.setdefault(label, {})[who] = value
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in owners}
    ticks: list[float] = []
    row = 0.0
    for group in groups.values():
        ticks.append(row + (len(group) - 1) / 2)
        for name in sorted(group, key=owners.index):
            rows[name].append((row, group[name]))
            row += 1.0
        row += GAP
    figure, (axes,) = charts.panels(width=WIDTH, height=1.5 + BAR_HEIGHT * row)
    for number, (name, found) in enumerate(rows.items()):
        at, widths = zip(*found, strict=True)
        axes.barh(at, widths, 0.9, label=name, color=charts.COLOURS[number % len(charts.COLOURS)])
    charts.style(axes, title)
    axes.grid(axis="x", color=charts.GRID)
    axes.set(ylim=(row, -1.0), xlabel=axis)
    axes.set_yticks(ticks, list(groups), fontsize=6)
    axes.legend(fontsize=7)
    return figure


def _decode_steps(steps: Sequence[Measurement]) -> Figure | None:
    from tidewheel.bench import charts

    models = list(dict.fromkeys(m.details["model"] for m in steps))
    if not steps:
        return None
    figure, panels = charts.panels(len(models), width=WIDTH)
    for axes, model in zip(panels, models, strict=True):
        mine = [m for m in steps if m.details["model"] == model]
        for number, context in enumerate(dict.fromkeys(m.details["context"] for m in mine)):
            line = sorted((m for m in mine if m.details["context"] == context), key=lambda m: m.details["batch"])
            batches, colour = [m.details["batch"] for m in line], charts.COLOURS[number % len(charts.COLOURS)]
            axes.plot(batches, [m.value for m in line], "o-", color=colour, label=f"context {context}")
            axes.plot(batches, [m.limit or 0.0 for m in line], "--", color=colour)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="batch size", ylabel="decode step, ms (dashed: physical limit)")
        charts.style(axes, model)
        axes.legend(fontsize=8)
    return figure
