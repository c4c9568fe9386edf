from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tidewheel.cli.simulation import Plan, Result
from tidewheel.cli.usage import UsageError
from tidewheel.simulate.report import Report, parts_table, table


def print_results(plan: Plan, results: Sequence[Result]) -> None:
    print(f"{plan.num_replicas} x {plan.cost.name} ({plan.cost.device}), {plan.router}, trace {plan.trace_kind}")
    print(table({_name(result): result.report for result in results}, title="policy"))
    for result in results:
        if len(result.report["classes"]) > 1 or len(result.report["tenants"]) > 1:
            print(f"\n{_name(result)}\n{parts_table(result.report)}")


def write_json(plan: Plan, results: Sequence[Result], target: str) -> None:
    record = {
        "trace": plan.trace_kind,
        "seed": plan.seed,
        "replicas": plan.num_replicas,
        "router": plan.router,
        "cost": plan.cost.name,
        "settings": plan.settings,
        "results": [{"policy": r.policy, "load": r.load, **r.report} for r in results],
    }
    text = json.dumps(record, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise UsageError(f"--json: {error}") from None


def write_plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the plots that have something to show; return their paths."""
    from tidewheel.simulate import plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plots: {error}") from None
    series = _by_policy(results)
    paths = [folder / "throughput_ttft.png"]
    plots.plot_throughput(series, paths[0])
    last = {policy: reports[-1] for policy, reports in series.items()}
    if any(len(report["classes"]) > 1 for report in last.values()):
        paths.append(folder / "classes.png")
        plots.plot_classes(last, paths[-1])
    if any(len(report["tenants"]) > 1 for report in last.values()):
        paths.append(folder / "fairness.png")
        plots.plot_fairness(last, paths[-1])
    loads = {
        policy: [(r.load, r.report) for r in results if r.policy == policy and r.load is not None]
        for policy in series
    }
    if any(len(points) > 1 for points in loads.values()):
        paths.append(folder / "queue.png")
        plots.plot_queue(loads, paths[-1])
    return paths


def _by_policy(results: Sequence[Result]) -> dict[str, list[Report]]:
    series: dict[str, list[Report]] = {}
    for result in results:
        series.setdefault(result.policy, []).append(result.report)
    return series


def with_progress(plan: Plan, results: Iterable[Result]) -> Iterator[Result]:
    total = len(plan.policies) * max(len(plan.loads), 1)
    for number, result in enumerate(results, 1):
        if sys.stderr.isatty():
            print(f"\r{number} of {total} done", end="\n" if number == total else "", file=sys.stderr)
        yield result


def _name(result: Result) -> str:
    return result.policy if result.load is None else f"{result.policy} {result.load:.0%}"
