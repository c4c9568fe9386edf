"""Results as Markdown: objectives, figures by stage, and gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpu.objectives import Objective, objectives
from gpu.values import Measurement


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


OBJECTIVE_HEAD = ("point", "objective", "target", "measured", "")
RESULT_HEAD = ("what", "case", "who", "value", "of the limit", "samples")


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
