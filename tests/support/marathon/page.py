"""Page of a marathon: verdicts, timeline and faults."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from matplotlib.axes import Axes

from support.marathon.judgement import MIB, Verdict, hourly_slope
from support.marathon.ledger import Call, Fault, Run
from tidewheel.bench.charts import COLOURS, GREYS, ChartImage, legend_below, logarithmic, panels, style
from tidewheel.bench.estimates import quantile
from tidewheel.bench.html_page import document, facts, figure, wide
from tidewheel.bench.tables import TextTable, number

RATE_BUCKET_S = 5.0
_WINDOW, _OTHER = COLOURS[3], GREYS[1]
_HOW = (
    "A canary is a greedy request of the highest class; its client sends it again, for 20 s, while errors are "
    "retryable. A window lasts from a fault to its recovery, 30 s after its end at most. Recovered: the server says "
    "that it is ready, and the last canary of each way (client library, HTTP stream, twin) was sent after the fault "
    "and answered at its first attempt. Clients that misbehave and reloads open no window: what fails then counts as "
    "outside. Requests of the load are sent once."
)


def verdict_table(verdicts: Sequence[Verdict]) -> TextTable:
    rows = [["pass" if one.passed else "FAIL", one.criterion, one.limit, one.found] for one in verdicts]
    return TextTable(["", "criterion", "limit", "found"], rows, num_labels=4)


def fault_table(run: Run) -> TextTable:
    """Show each kind's count, recoveries, and the canaries in its windows."""
    rows = []
    for kind in sorted({fault.kind for fault in run.faults}):
        faults = [fault for fault in run.faults if fault.kind == kind]
        recoveries = [fault.recovery_s for fault in faults]
        met = [call for call in run.calls if call.is_canary and any(_meets(call, fault.window) for fault in faults)]
        row: list[float] = [len(faults), statistics.median(recoveries), max(recoveries), len(met)]
        row += [sum(bool(call.first_error) for call in met), sum(bool(call.error) for call in met)]
        rows.append([kind, "yes" if faults[0].opens_window else "no", *map(number, row)])
    header = [
        "fault",
        "window",
        "times",
        "recovery, s: median",
        "worst",
        "canaries",
        "first attempt failed",
        "failed",
    ]
    return TextTable(header, rows)


def _meets(call: Call, window: tuple[float, float]) -> bool:
    return window[0] <= call.ended and call.sent <= window[1]


def figures(run: Run) -> dict[str, Any]:
    """Return what is recorded beside the verdicts."""
    canaries = [call for call in run.calls if call.is_canary]
    load = [call for call in run.calls if not call.is_canary]
    waits = {name: [call.ended - call.sent for call in canaries if not call.error and run.is_inside(call) == inside]
             for name, inside in (("outside", False), ("inside", True))}  # fmt: skip
    return {
        "seconds": run.seconds,
        "requests_per_s": run.rate,
        "requests": len(load),
        "canaries": len(canaries),
        "tokens": sum(call.num_tokens for call in run.calls),
        "load_ended_with": dict(Counter(call.error or "answered or cancelled" for call in load)),
        "canary_first_attempts": dict(Counter(call.first_error or "answered" for call in canaries)),
        "canary_seconds": {name: {"p50": quantile(found, 0.5), "p99": quantile(found, 0.99)}
                           for name, found in waits.items() if found},
        "seconds_in_windows": sum(end - begin for begin, end in _windows(run)),
        "memory_mib_an_hour": hourly_slope(run.samples, "memory") / MIB,
        "before": {**asdict(run.before), "files": len(run.before.files)},
        "after": {**asdict(run.after), "files": len(run.after.files)},
        "recovery_s": _recovery_s(run.faults),
    }  # fmt: skip


def _recovery_s(faults: Iterable[Fault]) -> dict[str, list[float]]:
    """Return seconds from the end of each fault to the recovery, by kind."""
    by_kind: dict[str, list[float]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(round(fault.recovery_s, 2))
    return by_kind


def _windows(run: Run) -> list[tuple[float, float]]:
    return [fault.window for fault in run.faults if fault.opens_window]


def render(title: str, run: Run, verdicts: Sequence[Verdict], picture: ChartImage, about: Mapping[str, Any]) -> str:
    result = "passed" if all(one.passed for one in verdicts) else "FAILED"
    found = figures(run)
    headline = (
        f"{result} · {run.seconds / 60:g} minutes · {found['requests']} requests, {found['canaries']} canaries, "
        f"{len(run.faults)} faults · commit {about['commit']} · {about['started']}"
    )
    table = fault_table(run)
    parts = [
        wide(verdict_table(verdicts)),
        figure(picture),
        *(["<h2>Faults</h2>", wide(table)] if table.rows else []),
        f'<p class="note">{escape(_HOW)}</p>',
        "<h2>To repeat it</h2>",
        facts(about),
    ]
    return document(title, headline, parts)


def recoveries(by_kind: Mapping[str, Sequence[float]]) -> ChartImage:
    """Draw how long each recorded fault took to its recovery, the slowest kind on top."""
    order = sorted(by_kind, key=lambda kind: statistics.median(by_kind[kind]))
    chart, (axes,) = panels(height=1.2 + 0.26 * len(order))
    for row, kind in enumerate(order):
        found = by_kind[kind]
        axes.plot(found, [row] * len(found), "o", color=COLOURS[0], alpha=0.6, markersize=6, markeredgewidth=0)
        axes.annotate(f"{statistics.median(found):.1f}", (max(found), row), (9, 0), textcoords="offset points",
                      va="center", fontsize=9, color=GREYS[0])  # fmt: skip
    axes.set_yticks(range(len(order)), [f"{kind}, {len(by_kind[kind])} times" for kind in order])
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    style(axes, "Seconds from the end of a fault to the recovery", "a dot for each fault; number: the median")
    return ChartImage("recoveries", f"Recovery from {sum(map(len, by_kind.values()))} faults.", chart)


def timeline(run: Run) -> ChartImage:
    kinds = sorted({fault.kind for fault in run.faults})
    draws: list[Callable[[Axes, Run], None]] = [_canaries, _throughput, _memory, _handles, _blocks]
    chart, all_axes = panels(rows=len(draws) + bool(kinds), height=2.2 * len(draws) + 0.4 * len(kinds), sharex=True)
    if kinds:
        _faults(all_axes[0], run, kinds)
    for axes, draw in zip(all_axes[bool(kinds) :], draws, strict=True):
        draw(axes, run)
        for begin, end in _windows(run):
            axes.axvspan(begin / 60, end / 60, color=_WINDOW, alpha=0.15, linewidth=0)
    all_axes[-1].set_xlabel("minutes")
    all_axes[-1].set_xlim(0, run.seconds / 60)
    legend_below(chart, all_axes[bool(kinds)])
    return ChartImage(
        "timeline", "Faults, canaries, throughput and what the server holds. Shaded: windows of faults.", chart
    )


def _faults(axes: Axes, run: Run, kinds: list[str]) -> None:
    style(axes, "Faults", "orange: to the recovery; grey: opens no window")
    for fault in run.faults:
        begin, end = fault.window
        colour = _WINDOW if fault.opens_window else _OTHER
        axes.barh(kinds.index(fault.kind), (end - begin) / 60, left=begin / 60, color=colour, height=0.7)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.invert_yaxis()


def _canaries(axes: Axes, run: Run) -> None:
    style(axes, "Canaries, seconds to the last token", "logarithmic; retries included")
    canaries = [call for call in run.calls if call.is_canary]
    groups = {
        "answered": [call for call in canaries if not call.first_error],
        "answered after retries": [call for call in canaries if call.first_error and not call.error],
        "failed": [call for call in canaries if call.error],
    }
    looks = ((COLOURS[0], ".", 9), (COLOURS[3], "^", 18), (COLOURS[1], "x", 18))
    for (name, calls), (colour, marker, size) in zip(groups.items(), looks, strict=True):
        x, y = [call.sent / 60 for call in calls], [call.ended - call.sent for call in calls]
        axes.scatter(x, y, s=size, color=colour, marker=marker, label=name, rasterized=True)
    logarithmic(axes)


def _throughput(axes: Axes, run: Run) -> None:
    style(axes, "Requests ended a second", f"of the load, by {RATE_BUCKET_S:g} s; orange: refused or failed")
    load = [call for call in run.calls if not call.is_canary]
    for calls, colour in (([c for c in load if not c.error], COLOURS[0]), ([c for c in load if c.error], COLOURS[1])):
        counts = Counter(int(call.ended // RATE_BUCKET_S) for call in calls)
        steps = range(int(run.seconds // RATE_BUCKET_S) + 1)
        axes.step([step * RATE_BUCKET_S / 60 for step in steps], [counts[step] / RATE_BUCKET_S for step in steps],
                  where="post", color=colour, linewidth=0.9)  # fmt: skip


def _memory(axes: Axes, run: Run) -> None:
    style(axes, "Private memory of all processes, MiB", "dotted: at rest before the start")
    _series(axes, run, "memory", COLOURS[0], MIB)
    axes.axhline(run.before.memory / MIB, color=GREYS[0], linestyle=":", linewidth=0.9)


def _handles(axes: Axes, run: Run) -> None:
    style(axes, "Descriptors and threads", "of all processes; green: threads; dotted: at rest before the start")
    for name, colour in (("descriptors", COLOURS[0]), ("threads", COLOURS[2])):
        _series(axes, run, name, colour)
        axes.axhline(getattr(run.before, name), color=colour, linestyle=":", linewidth=0.9)


def _blocks(axes: Axes, run: Run) -> None:
    style(axes, "KV blocks in use, %")
    _series(axes, run, "kv_use", COLOURS[0], 0.01)


def _series(axes: Axes, run: Run, name: str, colour: str, unit: float = 1) -> None:
    x = [sample.at / 60 for sample in run.samples]
    axes.plot(x, [getattr(sample, name) / unit for sample in run.samples], color=colour, linewidth=0.9)
