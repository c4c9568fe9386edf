import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tidewheel.bench.figure_columns import COLUMNS, FigureColumn, headings
from tidewheel.bench.tables import TextTable
from tidewheel.cli.simulation_scaling import scaling_options
from tidewheel.cli.usage import UsageError
from tidewheel.engine.build import check_record_folder
from tidewheel.request import Priority
from tidewheel.server.repository import parse_settings
from tidewheel.simulate.cost_model import BUILT_IN, CostModel
from tidewheel.simulate.fleet_choice import check_router
from tidewheel.simulate.outcomes import Figures
from tidewheel.simulate.scenario import ARRIVALS, Scenario, ScenarioResult
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.trace_files import read_trace
from tidewheel.workload.traces import PrefixMix, TenantMix, Trace

DEFAULT_LOAD = 0.8
MAX_LOAD = 10.0
HARDLY_ANY = 0.05  # mean waiting requests
_COLUMNS = (
    FigureColumn("finished", "", "finished"),
    FigureColumn("refused", "", "refused"),
    *(COLUMNS[title] for title in ("done", "output", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")),
    FigureColumn("mean latency", "s", "latency_s.mean"),
    FigureColumn("waiting", "", "mean_waiting"),
    FigureColumn("preempted", "", "preemptions"),
    COLUMNS["fairness"],
)
_SCALING_COLUMNS = (
    FigureColumn("late", "%", "late_share", 100.0),
    FigureColumn("replica hours", "", "replicas.hours"),
    FigureColumn("most replicas", "", "replicas.most"),
)
_DRAFT_COLUMNS = (
    FigureColumn("drafts accepted", "%", "drafts.accepted_share", 100.0),
    FigureColumn("accepted a step", "", "drafts.accepted_per_step"),
)
_PART_COLUMNS = (
    FigureColumn("requests", "", "num_requests"),
    *(COLUMNS[title] for title in ("TTFT p50", "TTFT p99")),
    FigureColumn("refused", "", "refused"),
    FigureColumn("latency p50", "s", "latency_s.p50"),
    FigureColumn("latency p99", "s", "latency_s.p99"),
)


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Return the scenario of the command line. Raise `UsageError` or `ConfigError` with option and value."""
    trace = None
    if args.trace not in ARRIVALS:
        trace = trace_file(args.trace, "--trace", f"one of {', '.join(ARRIVALS)}, or ")
    loads = args.load or ("" if trace is not None or args.rate is not None else str(DEFAULT_LOAD))
    settings = parse_settings(args.set)
    if "scheduling_policy" in settings:
        raise UsageError("--set scheduling_policy: use --policy")
    scaling_settings, history = scaling_options(args)
    if args.coarse:
        _check_coarse(args, trace)
    if args.find_replicas:
        _check_search(args)
    scenario = Scenario(
        arrivals=args.trace,
        recorded_trace=trace,
        num_requests=_at_least("--requests", args.requests, 1),
        rate=None if args.rate is None else _positive("--rate", args.rate),
        loads=tuple(_load(text) for text in loads.split(",") if text),
        prompt=Lengths.parse(args.prompt, name="--prompt"),
        output=Lengths.parse(args.output, name="--output"),
        max_tokens=None if args.max_tokens is None else _at_least("--max-tokens", args.max_tokens, 1),
        tenants=_tenants(args.tenants),
        prefixes=_prefixes(args.prefixes),
        seed=_at_least("--seed", args.seed, 0),
        policies=tuple(dict.fromkeys(args.policy.split(","))),
        num_replicas=scaling_settings.max_replicas,
        router=args.router,
        cost=_with_acceptance(cost_of(args.cost), args.draft_acceptance, settings),
        settings=settings,
        record="" if args.record is None else str(args.record),
        scaling=args.scaling or "",
        scaling_settings=scaling_settings,
        history=history,
        is_coarse=args.coarse,
        lora_load_s=_positive("--lora-load", args.lora_load),
    )
    check_router(scenario.router)
    for policy in scenario.policies:
        check_record_folder(scenario.config(policy))
    return scenario


def _with_acceptance(cost: CostModel, acceptance: float | None, settings: Mapping[str, str]) -> CostModel:
    if acceptance is None:
        return cost
    if settings.get("speculation", "none") == "none":
        raise UsageError("--draft-acceptance needs --set speculation=METHOD, which says what drafts")
    if not 0 <= acceptance <= 1:
        raise UsageError(f"--draft-acceptance is {acceptance:g}: it must be 0 to 1")
    return dataclasses.replace(cost, draft_acceptance=acceptance)


def _check_search(args: argparse.Namespace) -> None:
    if args.rate is None:
        raise UsageError("--find-replicas needs --rate: the load that they are to keep up with")
    given = {
        "--replicas": args.replicas != "1", "--scaling": args.scaling, "--json": args.json, "--plots": args.plots,
        "--record": args.record,
    }  # fmt: skip
    if others := [name for name, value in given.items() if value]:
        raise UsageError(f"{', '.join(others)}: not with --find-replicas, which prints a number of replicas")


def _check_coarse(args: argparse.Namespace, trace: Trace | None) -> None:
    if args.record is not None:
        raise UsageError("--record needs every step: leave out --coarse")
    if args.policy != "priority":
        raise UsageError(f"--policy is {args.policy}: --coarse simulates only priority")
    if trace is not None and np.isfinite(trace.deadlines).any():
        raise UsageError(f"--trace {args.trace} has deadline_s: leave out --coarse")


def print_results(scenario: Scenario, results: Sequence[ScenarioResult]) -> None:
    cost, settings = scenario.cost, scenario.scaling_settings
    count = f"{settings.min_replicas} to {settings.max_replicas}" if scenario.scaling else settings.max_replicas
    print(f"{count} x {cost.name}: {cost.device}\nrouter {scenario.router}, trace {scenario.arrivals}\n")
    columns = _COLUMNS + (_SCALING_COLUMNS if scenario.scaling else ())
    columns += _DRAFT_COLUMNS if scenario.settings.get("speculation", "none") != "none" else ()
    rows = [[_name(result), *(c.cell(result.figures) for c in columns)] for result in results]
    print(TextTable(["policy", *headings(columns)], rows, num_labels=1).as_text())
    parts = [
        [_name(result), name, *(c.cell(figures) for c in _PART_COLUMNS)]
        for result in results
        for name, figures in _parts(result.figures)
    ]
    if parts:
        print("\n" + TextTable(["policy", "part", *headings(_PART_COLUMNS)], parts).as_text())
    print("\n" + "\n".join([*map(verdict, results), *alike(results)]))


def verdict(result: ScenarioResult) -> str:
    """Return a sentence: the offered load, whether the system keeps up, and its steady rate."""
    figures = result.figures
    steady = figures["steady_requests_per_s"]
    rate = "too few finished for a steady rate" if steady is None else f"{steady:.3g} finish in the middle of the run"
    lost = f", {figures['refused']} of {figures['num_requests']} refused" if figures["refused"] else ""
    does = "keeps up" if figures["keeps_up"] else "does not keep up"
    return f"{_name(result)}: {figures['offered_per_s']:.3g} requests/s are offered, and it {does}{lost}; {rate}."


def alike(results: Sequence[ScenarioResult]) -> list[str]:
    """Return a sentence on policies with equal results and the reason, in a list; empty if all differ."""
    same = [(a, b) for a, b in itertools.combinations(results, 2) if a.load == b.load and a.figures == b.figures]
    if not same:
        return []
    names = ", ".join(dict.fromkeys(_name(result) for pair in same for result in pair))
    figures = same[0][0].figures
    if figures["mean_waiting"] < HARDLY_ANY:
        return [f"{names} decide alike: nothing waits at this load."]
    if len(figures["classes"]) == len(figures["tenants"]) == 1:
        return [f"{names} decide alike: all requests have one class and one tenant (--tenants NAME:SHARE:CLASS,…)."]
    return [f"{names} decide alike at this load."]


def print_replicas(scenario: Scenario) -> None:
    for policy in scenario.policies:
        count, figures = scenario.replicas_needed(policy)
        ttft = figures["ttft_s"]["p99"]
        print(
            f"{policy}: {count} x {scenario.cost.name} keep up with {scenario.rate:g} requests/s; p99 of the first "
            f"token {1e3 * ttft:.0f} ms"
        )


def _name(result: ScenarioResult) -> str:
    return result.policy if result.load is None else f"{result.policy} {result.load:.0%}"


def _parts(figures: Figures) -> Iterator[tuple[str, Figures]]:
    for kind, parts in (("class", figures["classes"]), ("tenant", figures["tenants"]), ("adapter", figures["loras"])):
        if len(parts) > 1:
            yield from ((f"{kind} {name or 'none'}", part) for name, part in parts.items())


def write_json(scenario: Scenario, results: Sequence[ScenarioResult], target: str) -> None:
    record = {
        "trace": scenario.arrivals,
        "seed": scenario.seed,
        "replicas": scenario.num_replicas,
        "scaling": scenario.scaling or None,
        "router": scenario.router,
        "cost": scenario.cost.name,
        "settings": scenario.settings,
        "results": [{"policy": r.policy, "load": r.load, **r.figures} for r in results],
    }
    text = json.dumps(record, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {error}") from None


def write_charts(results: Sequence[ScenarioResult], folder: Path) -> list[Path]:
    try:
        from tidewheel.simulate.charts import charts
    except ImportError:
        raise UsageError("--plots needs matplotlib: pip install 'tidewheel[load]'") from None
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in charts(results):
            paths.append(folder / f"{picture.name}.png")
            paths[-1].write_bytes(picture.png())
    except OSError as error:
        raise UsageError(f"--plots: {error}") from None
    return paths


def trace_file(text: str, option: str, others: str = "") -> Trace:
    path = Path(text)
    if path.suffix not in (".jsonl", ".csv"):
        raise UsageError(f"{option} is {text!r}: choose {others}a .jsonl or .csv file")
    return read_trace(path)


def cost_of(text: str) -> CostModel:
    if text in BUILT_IN:
        return BUILT_IN[text]
    if not Path(text).is_file():
        raise UsageError(f"--cost is {text!r}: no such file, and none of {', '.join(BUILT_IN)}")
    return CostModel.load(Path(text))


def _tenants(text: str | None) -> TenantMix:
    if text is None:
        return TenantMix()
    rows = []
    for entry in text.split(","):
        try:
            name, share, *priority = entry.split(":")
            of_class = Priority.from_wire(priority[0] if priority else 0)
            rows.append((name, _positive("--tenants", float(share)), of_class))
        except (ValueError, KeyError):
            raise UsageError(
                f"--tenants has {entry!r}: write NAME:SHARE or NAME:SHARE:CLASS, say acme:10:3"
            ) from None
    names, shares, priorities = zip(*rows, strict=True)
    if len(set(names)) != len(names):
        raise UsageError("--tenants names one of them twice")
    return TenantMix(names, shares, priorities)


def _prefixes(text: str | None) -> PrefixMix | None:
    if text is None:
        return None
    try:
        groups, tokens = (int(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(f"--prefixes is {text!r}: write N:TOKENS, say 8:512") from None
    return PrefixMix(_at_least("--prefixes", groups, 1), _at_least("--prefixes", tokens, 1))


def _load(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (load := float(text)) <= MAX_LOAD:
            return load
    raise UsageError(f"--load has {text!r}: it must be above 0 and at most {MAX_LOAD:g}, a share of the capacity")


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{name} is {value}: it must be at least {least}")
    return value


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{name} is {value:g}: it must be above 0")
    return value
