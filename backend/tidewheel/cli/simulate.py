"""`tidewheel simulate`: the real scheduler under a modelled clock."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.usage import UsageError

if TYPE_CHECKING:
    from tidewheel.cli.simulation import Plan

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_load(parser.add_argument_group("load"))
    _add_deployment(parser.add_argument_group("deployment"))
    _add_output(parser.add_argument_group("output"))
    recorded = parser.add_argument_group(
        "recordings", "what `tidewheel serve --record` has written; instead of a simulation"
    )
    recorded.add_argument("--replay", type=Path, metavar="FILE", help="decide all again, and compare every decision")
    recorded.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="fit a cost model to the steps of a recording"
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument(
        "--trace",
        default="poisson",
        metavar="KIND|FILE",
        help="poisson, bursty, switching, or a .jsonl or .csv file (default: %(default)s)",
    )
    load.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="of a synthetic trace (default: %(default)s)"
    )
    rate = load.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, metavar="R", help="requests per second, over all replicas")
    rate.add_argument(
        "--load",
        metavar="L[,L…]",
        help="the rate as a share of the capacity, one or several (default: 0.8; a file: its own rate)",
    )
    load.add_argument(
        "--prompt",
        default="lognormal:128:1:2048",
        metavar="SPEC",
        help="prompt lengths, KIND:MEAN[:SHAPE[:MAX]] (default: %(default)s)",
    )
    load.add_argument(
        "--output", default="lognormal:64:1:2048", metavar="SPEC", help="output lengths (default: %(default)s)"
    )
    load.add_argument(
        "--max-tokens", type=int, metavar="N", help="the limit that requests name (default: the longest output)"
    )
    load.add_argument(
        "--tenants", metavar="NAME:SHARE[:CLASS],…", help="who sends which share of the requests, in class 1 to 4"
    )
    load.add_argument(
        "--prefixes", metavar="N:TOKENS", help="N system prompts of TOKENS tokens, used with Zipf's law"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="one seed, one result (default: %(default)s)")


def _add_deployment(deployment: argparse._ArgumentGroup) -> None:
    deployment.add_argument(
        "--policy", default="priority", metavar="NAME[,NAME…]", help="scheduling_policy, one or several to compare"
    )
    deployment.add_argument("--replicas", type=int, default=1, metavar="N", help="engines behind the router")
    deployment.add_argument(
        "--router",
        default="least-loaded",
        metavar="NAME",
        help="round-robin, least-loaded, session-affinity, prefix-aware",
    )
    deployment.add_argument(
        "--cost", default="h200-8b", metavar="FILE|NAME", help="cost model of a step (default: %(default)s)"
    )
    deployment.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an engine setting, say max_num_seqs=64 (repeatable)",
    )


def _add_output(output: argparse._ArgumentGroup) -> None:
    output.add_argument("--json", metavar="FILE", help="write all figures; - is standard output, without the table")
    output.add_argument("--plots", type=Path, metavar="DIR", help="write plots as PNG")
    output.add_argument("--save-cost", type=Path, metavar="FILE", help="write the cost model that --calibrate finds")
    output.add_argument("--record", type=Path, metavar="DIR", help="record the decisions of every replica")


def run(args: argparse.Namespace) -> int:
    if args.replay is not None and args.calibrate is not None:
        raise UsageError("--replay and --calibrate exclude each other")
    if args.save_cost is not None and args.calibrate is None:
        raise UsageError("--save-cost goes with --calibrate")
    if args.replay is not None:
        return _replay(args.replay)
    if args.calibrate is not None:
        return _calibrate(args.calibrate, args.save_cost)
    return _simulate(_plan(args), args)


def _plan(args: argparse.Namespace) -> Plan:
    from tidewheel.cli.simulation import Plan

    return Plan.from_options(args)


def _simulate(plan: Plan, args: argparse.Namespace) -> int:
    from tidewheel.cli.simulation import simulate_all
    from tidewheel.cli.simulation_output import print_results, with_progress, write_json, write_plots

    results = list(with_progress(plan, simulate_all(plan)))
    if args.json != "-":
        print_results(plan, results)
    if args.json is not None:
        write_json(plan, results, args.json)
    if args.plots is not None:
        write_plots(results, args.plots)
    return 0


def _replay(path: Path) -> int:
    from tidewheel.simulate.recorded_runs import scheduler_of
    from tidewheel.simulate.replay import Recording, replay

    recording = Recording(path)
    replayed = replay(recording, scheduler_of(recording.header))
    what = f"{replayed.num_steps} steps, {replayed.num_requests} requests, {replayed.num_events} events"
    if replayed.difference:
        print(f"different after {what}\n{replayed.difference}")
        return DIFFERENT
    print(f"every decision is the same: {what}" + (" (the recording ends in the middle)" if replayed.is_cut else ""))
    return 0


def _calibrate(path: Path, target: Path | None) -> int:
    from tidewheel.simulate.recorded_runs import calibrated

    model = calibrated(path)
    if target is not None:
        model.save(target)
    for name in model.__dataclass_fields__:
        print(f"{name:24} {getattr(model, name)}")
    return 0
