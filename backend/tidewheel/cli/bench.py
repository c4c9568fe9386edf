"""`tidewheel bench`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tidewheel.cli.benchmark import DEFAULT_TPOT_S, DEFAULT_TTFT_S, SUITES, parts_of, why_no_vllm
from tidewheel.cli.benchmark_output import report
from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError

INTERRUPTED = 130
DEFAULT_MODEL = DEFAULT_REPOSITORY / "demo" / "1" / "weights"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    suites = "\n".join(f"  {name:8} {text}" for name, (text, *_) in SUITES.items())
    parser.epilog = (
        f"suites:\n{suites}\n\nThe folder of --out gets report.html, results.json, runs.jsonl and pictures."
    )
    parser.add_argument("--suite", choices=SUITES, default="run", help="what to measure (default: %(default)s)")
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
    what.add_argument("--dtype", default="float32", choices=_DTYPES, help="of all of it")
    what.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting of ours (repeatable)"
    )
    what.add_argument(
        "--baselines", type=Path, default=DEFAULT_REPOSITORY, metavar="DIR", help="where their entries are"
    )
    what.add_argument(
        "--offline-model", type=Path, metavar="DIR", help="of compare's offline part (default: --model)"
    )
    what.add_argument("--offline-dtype", default="bfloat16", choices=_DTYPES, help="default: %(default)s")
    what.add_argument("--one-at-a-time", action="store_true", help="start each target for its runs, and end it then")
    what.add_argument("--warm-up", type=_count, default=16, metavar="N", help="requests before the first run")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload", metavar="NAME", help="fixed, mixed, sharegpt[:SCALE], chat, shared-prefix, qos, trace:FILE"
    )
    load.add_argument(
        "--input", default="", metavar="LENGTHS", help="prompt tokens: range:16:128, lognormal:128:1.0:512 …"
    )
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
    load.add_argument(
        "--ttft", type=_seconds, metavar="S", help=f"objective: time to first token (default: {DEFAULT_TTFT_S:g})"
    )
    load.add_argument(
        "--tpot",
        type=_seconds,
        metavar="S",
        help=f"objective: time per output token (default: {DEFAULT_TPOT_S:g}). compare takes 10 and 5 times those of "
        "a request that the baseline serves alone, unless both are given",
    )
    load.add_argument("--timeout-s", type=_seconds, default=120.0, metavar="S", help="of one request")
    load.add_argument("--seed", type=_count, default=0)


def _add_where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("results")
    where.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: %(default)s")
    where.add_argument(
        "--record", type=Path, metavar="FILE", help="also the JSON as FILE, and the pictures beside it"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0, or 130 after Ctrl-C with the results so far kept; raise `UsageError`."""
    from tidewheel.bench import BenchError
    from tidewheel.errors import ConfigError

    # SIGTERM acts like Ctrl-C: servers end, results are kept.
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

    parts = list(parts_of(args))
    recorder = Recorder(args.out, environment())
    recorder.extra |= {"suite": args.suite, "vllm_cpu_ratio": None, "vllm_cpu_ratio_reason": why_no_vllm(parts)}
    interrupted = False
    try:
        for deployment, stage, run_stages in parts:
            with Experiment(
                deployment, recorder, stage.targets, warm_up=args.warm_up, one_at_a_time=args.one_at_a_time
            ) as experiment:
                run_stages(Suite(experiment, recorder, stage))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: keeping what was measured", file=sys.stderr)
    finally:
        if recorder.extra["vllm_cpu_ratio"] is not None:
            del recorder.extra["vllm_cpu_ratio_reason"]
        if any(result.runs for result in recorder.stages):
            report(recorder, args.record)
    return INTERRUPTED if interrupted else 0


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
