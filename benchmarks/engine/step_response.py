"""Step responses of the controllers, on the modelled engines of `controller_models.py`, and how each settled.

    python benchmarks step_response [tpot] [governor] [window] --save

* `tpot`: the token budget, when four times as many rows decode and when the target changes;
* `governor`: the running requests, when outputs triple and shrink again, and when a step time target is set;
* `window`: the window of dynamic batches, when the load changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from common.study import RESULTS, Study, show
from modelled.controller_models import (
    SEED,
    GovernorScenario,
    TpotScenario,
    Trace,
    WindowScenario,
    run_governor,
    run_tpot,
    run_window,
)
from tidewheel.bench.charts import COLOURS, GREYS, INK, ChartImage, name_lines, panels, style
from tidewheel.scheduler.controllers import KV_HIGH, KV_LOW
from tidewheel.scheduler.strategy import TOLERANCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_POINTS = 200
TAIL = 0.3  # end of a phase, taken as settled
WITHIN = 0.15  # of the settled value


class Phase(NamedTuple):
    begin_s: float
    end_s: float
    settled_value: float  # over the end of the phase
    lowest: float
    highest: float
    settling_s: float  # until within 15 % of the settled value


def phases(trace: Trace, column: str, changes: list[float]) -> list[Phase]:
    seconds = trace["seconds"]
    found = []
    for begin, end in pairwise([*sorted(changes), seconds[-1]]):
        points = [(t, value) for t, value in zip(seconds, trace[column], strict=True) if begin <= t <= end]
        tail = [value for t, value in points if t >= end - TAIL * (end - begin)]
        settled = statistics.fmean(tail)
        outside = [t for t, value in points if abs(value - settled) > WITHIN * settled]
        settling = (outside[-1] - begin) if outside else 0.0
        found.append(Phase(*(round(x, 3) for x in (begin, end, settled, min(tail), max(tail), settling))))
    return found


def changes_of(*schedules: tuple[tuple[float, float], ...]) -> list[float]:
    return sorted({begin for schedule in schedules for begin, _ in schedule})


def draw_tpot(panels: list[Axes], trace: Trace, scenario: TpotScenario) -> None:
    above, below = panels
    above.step(trace["seconds"], trace["target_ms"], color=INK, linestyle="--", where="post", label="target")
    above.plot(trace["seconds"], trace["tpot_ms"], color=COLOURS[0], label="measured")
    below.plot(trace["seconds"], trace["budget_tokens"], color=COLOURS[1], label="budget")
    notes = [(begin, f"{rows} rows decode") for begin, rows in scenario.rows]
    notes += [(begin, f"target {1e3 * target:g} ms") for begin, target in scenario.targets[1:]]
    finish(panels, ["Time of a step, ms", "Token budget of a step: what the controller moves"], notes)


def draw_governor(panels: list[Axes], trace: Trace, scenario: GovernorScenario) -> None:
    free = thinned(run_governor(scenario, governed=False))
    top, middle, bottom = panels
    top.step(trace["seconds"], trace["max_num_seqs"], color=COLOURS[1], where="post", label="limit")
    middle.axhspan(1e2 * KV_LOW, 1e2 * KV_HIGH, color=COLOURS[0], alpha=0.12, linewidth=0)
    preempted = [f"{of['preemptions'][-1]:.0f} preemptions" for of in (trace, free)]
    middle.plot(free["seconds"], free["kv_use_percent"], color=GREYS[1], label=f"without: {preempted[1]}")
    middle.plot(trace["seconds"], trace["kv_use_percent"], color=COLOURS[0], label=f"with: {preempted[0]}")
    begin, target = scenario.targets[-1]
    bottom.plot(trace["seconds"], trace["step_ms"], color=COLOURS[0], label="measured")
    bottom.hlines(1e3 * target, begin, scenario.seconds, color=INK, linestyle="--")
    notes = [(begin, f"outputs of {mean:g} tokens") for begin, mean in scenario.mean_outputs]
    titles = [
        "Limit of running requests: what the governor moves",
        "KV blocks used, %; in the band nothing moves",
        "Time of a step, ms; dashed: its target",
    ]
    finish(panels, titles, [*notes, (begin, f"target {1e3 * target:g} ms")])


def draw_window(panels: list[Axes], trace: Trace, scenario: WindowScenario) -> None:
    above, below = panels
    above.plot(trace["seconds"], trace["smoothed_ms"], color=COLOURS[0], label="smoothed")
    target = 1e3 * scenario.target_latency_s
    above.axhline(TOLERANCE * target, color=INK, linestyle="--")
    below.step(trace["seconds"], trace["window_ms"], color=COLOURS[1], where="post", label="window")
    notes = [(begin, f"{rate:g} requests/s") for begin, rate in scenario.arrivals_per_s]
    latency = f"Latency of a batch, ms; dashed: {TOLERANCE} x batch_target_latency_ms"
    finish(panels, [latency, "Window, ms: what the controller moves"], notes)


def finish(panels: list[Axes], titles: list[str], notes: list[tuple[float, str]]) -> None:
    """Add titles, line labels and the axis of time; mark each change of the rate, labelled in the top panel."""
    for axes, title in zip(panels, titles, strict=True):
        for begin, _ in notes:
            if begin > 0.0:
                axes.axvline(begin, color=GREYS[1], linewidth=0.8)
        axes.margins(x=0)
        axes.set_ylim(0, 1.25 * max(max(line.get_ydata()) for line in axes.get_lines()))
        style(axes, title)
        name_lines(axes, least=0.12)
    for begin, text in notes:
        panels[0].annotate(
            text, (begin, 1.0), xytext=(4, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            va="top", fontsize=9,
        )  # fmt: skip
    panels[-1].set_xlabel("time, s")


class Response(NamedTuple):
    scenario: Any
    run: Callable[[Any], Trace]
    draw: Callable[[list[Axes], Trace, Any], None]
    num_panels: int
    knob: str
    changes: list[float]


def responses() -> dict[str, Response]:
    tpot, governor, window = TpotScenario(), GovernorScenario(), WindowScenario()
    at_governor = changes_of(governor.mean_outputs, governor.targets)
    return {
        "tpot": Response(tpot, run_tpot, draw_tpot, 2, "budget_tokens", changes_of(tpot.rows, tpot.targets)),
        "governor": Response(governor, run_governor, draw_governor, 3, "max_num_seqs", at_governor),
        "window": Response(window, run_window, draw_window, 2, "window_ms", changes_of(window.arrivals_per_s)),
    }


def thinned(trace: Trace) -> Trace:
    stride = max(len(trace["seconds"]) // NUM_POINTS, 1)
    return {name: [round(value, 3) for value in column[::stride]] for name, column in trace.items()}


def plot(name: str, response: Response, trace: Trace) -> None:
    figure, axes = panels(rows=response.num_panels, height=1.8 * response.num_panels + 0.5, sharex=True)
    response.draw(axes, thinned(trace), response.scenario)
    (RESULTS / f"{name}.webp").write_bytes(ChartImage(name, "", figure).webp())


def main() -> None:
    known = responses()
    study = Study("step_response_NAME", __doc__, "numpy", "matplotlib")
    study.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(known)}; all of them if none is given"
    )
    options = study.begin()
    for name in options.names or known:
        if name not in known:
            study.error(f"{name!r} is none of {', '.join(known)}")
        response = known[name]
        trace = response.run(response.scenario)
        found = [phase._asdict() for phase in phases(trace, response.knob, response.changes)]
        show({"controller": name, "knob": response.knob, **phase} for phase in found)
        result = {
            "what": "modelled engine, no device: how a controller answers, not how fast anything is",
            "seed": SEED,
            "settings": asdict(response.scenario),
            "knob": response.knob,
            "phases": found,
        }
        study.save(result, f"step_response_{name}")
        if options.save:
            plot(f"step_response_{name}", response, trace)


if __name__ == "__main__":
    main()
