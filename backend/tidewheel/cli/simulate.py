import argparse
from pathlib import Path

from tidewheel.cli.usage import UsageError

DIFFERENT = 1  # exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_load(parser.add_argument_group("load"))
    deployment = parser.add_argument_group("deployment")
    add = deployment.add_argument
    add("--policy", default="priority", metavar="NAME[,NAME…]", help="scheduling_policy, one or several to compare")
    _add_scaling(deployment)
    routers = "round-robin, least-loaded, session-affinity or prefix-aware (default: %(default)s)"
    add("--router", default="least-loaded", metavar="NAME", help=routers)
    add("--cost", default="h200-8b", metavar="FILE|NAME", help="how long a step takes (default: %(default)s)")
    settings = "an engine setting, such as max_num_seqs=64 (repeatable)"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=settings)
    text = "chance that a draft is accepted after accepted ones, with --set speculation=… (default: the cost model's)"
    add("--draft-acceptance", type=float, metavar="P", help=text)
    add("--lora-load", type=float, default=0.5, metavar="SECONDS", help="to read an adapter (default: %(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write all figures; - writes them to standard output, without the tables")
    add("--plots", type=Path, metavar="DIR", help="write charts as PNG")
    add("--record", type=Path, metavar="DIR", help="record every decision of each replica")
    text = "use a recording of --record, or of `tidewheel serve --record`, instead of a simulation"
    add = parser.add_argument_group("recordings", text).add_argument
    add("--replay", type=Path, metavar="FILE", help="decide everything again; show the first difference")
    add("--calibrate", type=Path, metavar="FILE", help="fit a cost model to the recorded steps")
    add("--save-cost", type=Path, metavar="FILE", help="write the cost model of --calibrate, for --cost")


def _add_load(load: argparse._ArgumentGroup) -> None:
    add = load.add_argument
    kinds = "poisson, bursty, switching or daily arrivals, or a .jsonl or .csv file (default: %(default)s)"
    add("--trace", default="poisson", metavar="KIND|FILE", help=kinds)
    add("--requests", type=int, default=2000, metavar="N", help="number of requests (default: %(default)s)")
    rate = load.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, metavar="R", help="requests per second, over all replicas")
    shares = "rate as a share of the capacity, one or several (default: 0.8; for a file, its own rate)"
    rate.add_argument("--load", metavar="L[,L…]", help=shares)
    spec = "lengths of prompts, KIND:MEAN[:SHAPE[:MAX]] (default: %(default)s)"
    add("--prompt", default="lognormal:128:1:2048", metavar="SPEC", help=spec)
    add("--output", default="lognormal:64:1:2048", metavar="SPEC", help="lengths of outputs (default: %(default)s)")
    add("--max-tokens", type=int, metavar="N", help="max_tokens of all requests (default: the longest output)")
    tenants = "share of the requests, and class from 1 (CRITICAL) to 4 (LOW), of each tenant"
    add("--tenants", metavar="NAME:SHARE[:CLASS],…", help=tenants)
    prefixes = "put one of N system prompts of TOKENS tokens, chosen by Zipf's law, before each prompt"
    add("--prefixes", metavar="N:TOKENS", help=prefixes)
    add("--seed", type=int, default=0, metavar="N", help="equal seeds give equal results (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if args.replay is not None and args.calibrate is not None:
        raise UsageError("--replay and --calibrate exclude each other")
    if args.save_cost is not None and args.calibrate is None:
        raise UsageError("--save-cost goes with --calibrate")
    if args.replay is not None:
        return _replay(args.replay)
    return _simulate(args) if args.calibrate is None else _calibrate(args.calibrate, args.save_cost)


def _simulate(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from tidewheel.cli.simulation import print_replicas, print_results, scenario_of, write_charts, write_json

    scenario = scenario_of(args)
    if args.find_replicas:
        print_replicas(scenario)
        return 0
    results = list(tqdm(scenario.results(), total=scenario.num_runs, disable=None))  # None: on a terminal only
    if args.json != "-":
        print_results(scenario, results)
    if args.json is not None:
        write_json(scenario, results, args.json)
    if args.plots is not None:
        write_charts(results, args.plots)
    return 0


def _replay(path: Path) -> int:
    from tidewheel.simulate.replay import Recording, replay, scheduler_of

    recording = Recording(path)
    replayed = replay(recording, scheduler_of(recording.header))
    done = f"{replayed.num_steps} steps, {replayed.num_requests} requests, {replayed.num_events} events"
    if replayed.difference:
        print(f"different after {done}\n{replayed.difference}")
        return DIFFERENT
    print(f"every decision is the same: {done}" + (" (the recording was cut off)" if replayed.is_cut else ""))
    return 0


def _calibrate(path: Path, target: Path | None) -> int:
    from tidewheel.simulate.calibration import calibrated

    model = calibrated(path)
    if target is not None:
        model.save(target)
    for name in model.__dataclass_fields__:
        if name != "fit":
            print(f"{name:24} {getattr(model, name)}")
    print(
        f"fitted to {model.fit['num_steps']:.0f} steps: R² {model.fit['r_squared']:.4f}, "
        f"error {model.fit['sum_error']:+.1%} in all, {model.fit['median_error']:.1%} in the median step"
    )
    return 0


def _add_scaling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--replicas", default="1", metavar="N|MIN:MAX", help="number of engines (default: %(default)s)")
    policies = "reactive, predictive, queue-depth or ongoing: change the number of engines from MIN to MAX"
    add("--scaling", metavar="NAME", help=policies)
    add("--startup-s", type=float, metavar="S", help="time until a new engine is ready (default: 120)")
    add("--scale", action="append", default=[], metavar="KEY=VALUE", help="a setting of --scaling (repeatable)")
    search = "print the least number of engines that keep up with --rate, instead of a table"
    add("--find-replicas", action="store_true", help=search)
    add("--history", type=Path, metavar="FILE", help="trace of the days before, for --scaling predictive")
    add("--coarse", action="store_true", help="merge decode steps: for days of traffic")
