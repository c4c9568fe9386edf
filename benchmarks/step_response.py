"""Step responses of the controllers, on the modelled engines of `controller_models.py`, and how each settled.

    python benchmarks/step_response.py [tpot] [governor] [window] --save

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

from controller_models import (
    SEED,
    GovernorScenario,
    TpotScenario,
    Trace,
    WindowScenario,
    run_governor,
    run_tpot,
    run_window,
)
from study import RESULTS, Study, show
from tidewheel.scheduler.controllers import KV_HIGH, KV_LOW
from tidewheel.scheduler.strategy import MAX_WINDOW_S, MIN_WINDOW_S, TOLERANCE

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
    seconds = trace["seconds"]
    above.plot(seconds, trace["tpot_ms"], label="TPOT (time of a step)", linewidth=0.8)
    above.step(seconds, trace["target_ms"], "k--", where="post", label="target_tpot_ms")
    above.set(
        ylabel="TPOT, ms", ylim=(0, 110), title="TPOT controller: prompts always wait, every step fills its budget"
    )
    below.plot(seconds, trace["budget_tokens"], "C1", label="token budget")
    below.axhline(scenario.min_budget, color="gray", linestyle=":", label="least and largest budget")
    below.axhline(scenario.max_budget, color="gray", linestyle=":")
    below.set(ylabel="tokens of a step", xlabel="time, s", ylim=(0, 1.1 * scenario.max_budget))
    notes = [(begin, f"{rows} rows decode") for begin, rows in scenario.rows]
    notes += [(begin, f"target {1e3 * target:g} ms") for begin, target in scenario.targets[1:]]
    annotate(panels, notes)


def draw_governor(panels: list[Axes], trace: Trace, scenario: GovernorScenario) -> None:
    free = run_governor(scenario, governed=False)
    top, middle, bottom = panels
    seconds = trace["seconds"]
    top.plot(free["seconds"], free["running"], color="lightgray", label="running, no governor")
    top.plot(seconds, trace["running"], "C2", linewidth=0.8, label="running")
    top.step(seconds, trace["max_num_seqs"], "C1", where="post", label="max_num_seqs, governed")
    top.set(ylabel="requests", ylim=(0, 1.1 * scenario.max_num_seqs))
    top.set_title(
        f"Governor: more requests wait than fit; {trace['preemptions'][-1]:.0f} preemptions, "
        f"{free['preemptions'][-1]:.0f} without it"
    )
    middle.plot(free["seconds"], free["kv_use_percent"], color="lightgray", label="KV use, no governor")
    middle.plot(seconds, trace["kv_use_percent"], "C0", linewidth=0.8, label="KV use")
    middle.axhspan(1e2 * KV_LOW, 1e2 * KV_HIGH, color="C0", alpha=0.12, label="band in which nothing moves")
    middle.set(ylabel="KV blocks used, %", ylim=(0, 110))
    bottom.plot(free["seconds"], free["step_ms"], color="lightgray", label="step time, no governor")
    bottom.plot(seconds, trace["step_ms"], "C3", linewidth=0.6, label="step time")
    begin, target = scenario.targets[-1]
    bottom.hlines(1e3 * target, begin, scenario.seconds, "k", "--", label="governor_target_latency_ms")
    bottom.set(ylabel="step, ms", xlabel="time, s", ylim=(0, None))
    notes = [(begin, f"outputs of {mean:g} tokens") for begin, mean in scenario.mean_outputs]
    annotate(panels, [*notes, (begin, f"step target {1e3 * target:g} ms")])


def draw_window(panels: list[Axes], trace: Trace, scenario: WindowScenario) -> None:
    above, below = panels
    seconds = trace["seconds"]
    above.plot(seconds, trace["latency_ms"], ".", markersize=2, color="lightgray", label="latency of a batch")
    above.plot(seconds, trace["smoothed_ms"], "C0", linewidth=0.8, label="smoothed")
    target = 1e3 * scenario.target_latency_s
    above.axhline(TOLERANCE * target, color="k", linestyle="--", label=f"{TOLERANCE} x batch_target_latency_ms")
    above.axhline(target, color="k", linestyle=":", label="batch_target_latency_ms")
    above.set(ylabel="latency, ms", ylim=(0, 2.5 * target), title="Window of dynamic batches: Poisson arrivals")
    below.step(seconds, trace["window_ms"], "C1", where="post", label="window")
    below.plot(seconds, trace["batch_size"], ".", markersize=2, color="C2", alpha=0.4, label="requests of a batch")
    for limit in (MIN_WINDOW_S, MAX_WINDOW_S):
        below.axhline(1e3 * limit, color="gray", linestyle=":")
    below.set(ylabel="window, ms; requests", xlabel="time, s", ylim=(0, 115))
    annotate(panels, [(begin, f"{rate:g} requests/s") for begin, rate in scenario.arrivals_per_s])


def annotate(axes: list[Axes], notes: list[tuple[float, str]]) -> None:
    """Draw changes through all plots, named in the topmost."""
    for axis in axes:
        for begin, _ in notes:
            if begin > 0.0:
                axis.axvline(begin, color="gray", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.margins(x=0)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    for begin, text in notes:
        axes[0].annotate(
            text, (begin, 1.0), xytext=(3, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            va="top", fontsize="small",
        )  # fmt: skip


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
    from tidewheel.bench import charts

    figure, panels = charts.panels(rows=response.num_panels, width=10, height=6.5, sharex=True)
    response.draw(panels, trace, response.scenario)
    figure.savefig(RESULTS / f"{name}.png", dpi=100)


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
            "trace": thinned(trace),
        }
        study.save(result, f"step_response_{name}", indent=None)
        if options.save:
            plot(f"step_response_{name}", response, trace)


if __name__ == "__main__":
    main()
