import argparse
import functools
import signal
from pathlib import Path
from typing import Any

from tidewheel.bench import SUITES, BenchError
from tidewheel.cli.serve import DEFAULT_REPOSITORY
from tidewheel.cli.usage import UsageError
from tidewheel.stats import DEFAULT_TPOT_S, DEFAULT_TTFT_S

DEFAULT_MODEL = DEFAULT_REPOSITORY / "demo" / "1" / "weights"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    suites = "\n".join(f"  {name:8} {text}" for name, (text, *_) in SUITES.items())
    files = "The folder of --out gets report.html, results.json, runs.jsonl and pictures."
    parser.epilog = f"suites:\n{suites}\n\n{files}"
    parser.add_argument("--suite", choices=SUITES, default="run", help="what to measure (default: %(default)s)")
    _add_what(parser.add_argument_group("targets"))
    _add_load(parser.add_argument_group("load"))
    _add_objective(parser.add_argument_group("objective"))
    where = parser.add_argument_group("results")
    where.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="default: %(default)s")
    where.add_argument(
        "--record", type=Path, metavar="FILE", help="write the figures here too, with pictures beside them"
    )


def _add_what(what: argparse._ArgumentGroup) -> None:
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    _repeated(
        what,
        "--target",
        "SPEC",
        "continuous, static, dynamic, predictive, hybrid; baseline_dynamic, baseline_static; transformers, llm; "
        "vllm=PYTHON, openvino=PYTHON; grpc://HOST:PORT/MODEL; http://HOST:PORT/v2/models/MODEL/generate_stream or "
        "/infer; http://HOST:PORT/v1/completions?model=NAME; [NAME=]SPEC[,SETTING=VALUE…] (default: the suite's)",
    )
    _repeated(what, "--peer", "SPEC", "a target besides the suite's own")
    what.add_argument("--model", **folder, default=DEFAULT_MODEL, help="weights of what is served here")
    what.add_argument("--dtype", choices=_DTYPES, help="of what is served here and of peers (default: float32)")
    _repeated(what, "--set", "KEY=VALUE", "a setting of our engines: of strategies and of llm")
    beside = "a model beside each target, for the requests of --workload mix: image=FILE.onnx and speech=FILE.onnx"
    _repeated(what, "--one-shot", "NAME=FILE[,inputs=FILE.npz][,SETTING=VALUE…]", beside)
    what.add_argument("--baselines", **folder, help=f"where their entries are (default: {DEFAULT_REPOSITORY})")
    what.add_argument("--offline-model", **folder, help="of compare's offline part (default: --model)")
    what.add_argument("--offline-dtype", choices=_DTYPES, help="of compare's offline part (default: bfloat16)")
    what.add_argument("--one-at-a-time", action="store_true", help="start each target for its runs, and end it then")
    what.add_argument(
        "--warm-up",
        type=functools.partial(_at_least, 0),
        default=16,
        metavar="N",
        help="requests before the first run",
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    seconds: dict[str, Any] = {"type": _seconds, "metavar": "S"}
    number: dict[str, Any] = {"type": functools.partial(_at_least, 1), "metavar": "N"}
    lengths: dict[str, Any] = {"default": "", "metavar": "LENGTHS"}
    workloads = "fixed, mixed, sharegpt[:SCALE], chat, shared-prefix, qos, mix, critical, agents[:SCALE], trace:FILE"
    load.add_argument("--workload", metavar="NAME", help=workloads)
    load.add_argument("--input", **lengths, help="prompt tokens: range:16:128, lognormal:128:1.0:512 …")
    load.add_argument("--output", **lengths, help="output tokens, likewise")
    load.add_argument("--max-tokens", **number, help="longest prompt and output together")
    load.add_argument("--vocab", **number, help="ids are below it (default: the model's)")
    loads = "closed:N, poisson:RATE, burst:RATE[:BURSTINESS], ramp:LOW:HIGH[:STEPS], trace[:SPEED] or all"
    _repeated(load, "--load", "LOAD", loads)
    load.add_argument("--seconds", **seconds, default=10.0, help="of sending, a run (default: %(default)g)")
    load.add_argument("--requests", **number, help="at most, a run")
    load.add_argument("--repeats", **number, help="of every run, but for compare's search (default: 3)")
    load.add_argument("--timeout-s", **seconds, default=120.0, help="of one request")
    load.add_argument("--seed", type=functools.partial(_at_least, 0), default=0)


def _add_objective(objective: argparse._ArgumentGroup) -> None:
    objective.description = (
        "compare takes 10 and 5 times those of a request that the baseline serves alone, unless both are given; it "
        "measures a rate for --seconds, and up to four times as long until it is clear"
    )
    seconds: dict[str, Any] = {"type": _seconds, "metavar": "S"}
    objective.add_argument("--ttft", **seconds, help=f"time to first token (default: {DEFAULT_TTFT_S:g})")
    objective.add_argument("--tpot", **seconds, help=f"time per output token (default: {DEFAULT_TPOT_S:g})")
    objective.add_argument("--budget-s", **seconds, help="of compare's search (default: no limit)")


def _repeated(group: argparse._ArgumentGroup, name: str, metavar: str, text: str) -> None:
    group.add_argument(name, action="append", default=[], metavar=metavar, help=f"{text} (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0, or 130 after Ctrl-C, with finished results kept. Raise `UsageError`."""
    from tidewheel.cli.bench_parts import measure
    from tidewheel.errors import ConfigError

    # SIGTERM acts like Ctrl-C: servers end, results are kept.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return measure(args)
    except (BenchError, ConfigError) as error:
        raise UsageError(str(error)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, at least {least}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds: 0.001 to 86400")
    return seconds
