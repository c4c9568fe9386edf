"""Output tokens per second in-process, beside the speed of light and with parts switched off.

256 requests of 100 to 1,024 tokens in and out, and 1,000 of ShareGPT-like lengths, all waiting at the start; random
weights, bfloat16, temperature 0.6, end of sequence ignored.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.work_items import TEMPERATURE, WorkItem, headline, sharegpt, within_vocabulary
from gpu.engine_steps import MAX_NUM_SEQS, Timed, TimedLLM, limit_ratio, open_engine, warm_up
from gpu.measurements import OURS, Measurement, duration, throughput
from gpu.stage import Stage, parser, run
from modelled.roofline import SHAPES, workload_seconds
from tidewheel.errors import ConfigError

HEADLINE, SHAREGPT = "256 requests, 100-1024 in and out", "1000 requests, ShareGPT-like lengths"
REPEATS = {"qwen3-0.6b": 3}  # others: 2
VARIANTS = (
    ("without overlap", {"async_scheduling": False}),
    ("without CUDA graphs", {"enforce_eager": True}),
    ("deterministic", {"deterministic": True}),
)
NEEDS_S = {"qwen3-0.6b": 12.0, "llama-3.1-8b": 30.0}  # of one run with its start, at most
NUM_KEPT = 2000  # samples of times between tokens


def headline_work(stage: Stage, model: str) -> list[WorkItem]:
    return within_vocabulary(headline(4, 4, 16) if stage.is_dry else headline(), SHAPES[model].vocab)


def sharegpt_work(stage: Stage, model: str) -> list[WorkItem]:
    work = [WorkItem(item.input_ids[:16], 4) for item in sharegpt(4)] if stage.is_dry else sharegpt()
    return within_vocabulary(work, SHAPES[model].vocab)


def report(
    stage: Stage, model: str, workload: str, work: list[WorkItem], seconds: list[float], who: str, **details: object
) -> None:
    lengths = [(len(item.input_ids), item.num_output_tokens) for item in work]
    num_output = sum(output for _, output in lengths)
    most = num_output / workload_seconds(SHAPES[model], lengths, MAX_NUM_SEQS, stage.ceilings)
    facts = {"workload": workload, "model": model, "num_output_tokens": num_output, **details}
    case, unit = f"{model}, {workload}", "output tokens/s"
    stage.result(throughput("engine throughput", case, seconds, num_output, unit, most, who=who, details=facts))


def report_streams(
    stage: Stage,
    model: str,
    who: str,
    num_tokens: int,
    seconds: float,
    gaps: Sequence[float],
    first_tokens: list[float],
) -> None:
    """Report rate, times between tokens (ITL) and to first tokens, in seconds, of all requests at once."""
    case = f"{model}, 256 concurrent"
    facts = {"who": who, "details": {"model": model, "num_tokens": num_tokens}}
    stage.result(throughput("streamed tokens", case, [seconds], num_tokens, "output tokens/s", None, **facts))
    stage.result(duration("inter-token latency p50", case, thinned(gaps), None, **facts))
    p99 = statistics.quantiles(gaps, n=100)[98]
    stage.result(duration("inter-token latency p99", case, [p99], None, **facts))
    stage.result(duration("time to first token", f"{case}, all at once", first_tokens, None, **facts))


def thinned(values: Sequence[float], count: int = NUM_KEPT) -> list[float]:
    """Return evenly spaced order statistics, which keep the median."""
    ordered = sorted(values)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def report_in_process(stage: Stage, model: str, timed: Timed, work: list[WorkItem]) -> None:
    num_tokens = sum(item.num_output_tokens for item in work)
    report_streams(stage, model, "in-process", num_tokens, timed.seconds, timed.gaps(), timed.first_token_seconds())


def _steps(stage: Stage, model: str, workload: str, timed: Timed) -> None:
    steps = timed.decode_steps()
    if not steps:
        stage.skip(f"decode steps, {model}, {workload}", "no step was a decode only")
        return
    ratio = limit_ratio(steps, SHAPES[model], stage.ceilings)
    measured = Measurement(
        name="decode steps over limit",
        case=f"{model}, {workload}",
        value=ratio,
        unit="x",
        samples=[step.seconds for step in steps],
        percent=100.0 / ratio,
        details={"batch": [step.batch for step in steps], "context": [round(step.context) for step in steps]},
    )
    stage.result(measured)


def _main_engine(stage: Stage, model: str, folder: Path) -> None:
    with open_engine(stage, model, folder) as engine:
        work = headline_work(stage, model)
        warm_up(engine, work, TEMPERATURE)
        repeats = 1 if stage.is_dry or stage.options.once else REPEATS.get(model, 2)
        runs = [engine.timed(work, TEMPERATURE) for _ in range(repeats)]
        report(stage, model, HEADLINE, work, [timed.seconds for timed in runs], OURS)
        _steps(stage, model, HEADLINE, runs[-1])
        report_in_process(stage, model, runs[-1], work)
        if stage.options.once:
            return
        with stage.part(f"{model}, {SHAREGPT}"):
            stage.check_time(NEEDS_S.get(model, 0.0))
            _sharegpt(stage, model, engine)


def _sharegpt(stage: Stage, model: str, engine: TimedLLM) -> None:
    work = sharegpt_work(stage, model)
    timed = engine.timed(work, TEMPERATURE)
    report(stage, model, SHAREGPT, work, [timed.seconds], OURS)
    first = timed.first_token_seconds()
    stage.result(duration("time to first token", f"{model}, {SHAREGPT}, all at once", first, None))


def _variant(stage: Stage, model: str, folder: Path, who: str, settings: dict[str, bool]) -> None:
    try:
        with open_engine(stage, model, folder, **settings) as engine:
            work = headline_work(stage, model)
            warm_up(engine, work, TEMPERATURE)
            seconds = [engine.timed(work, TEMPERATURE).seconds]
            report(stage, model, HEADLINE, work, seconds, f"{OURS} {who}")
    except ConfigError as error:
        stage.skip(f"{model} {who}", str(error))


def body(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for model in stage.models:
            with stage.part(f"engine throughput, {model}"):
                _main_engine(stage, model, folder)
        for model in () if stage.options.once else stage.models:
            for who, settings in VARIANTS:
                with stage.part(f"{model} {who}"):
                    stage.check_time(NEEDS_S.get(model, 0.0))
                    _variant(stage, model, folder, who, settings)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--once", action="store_true", help="one run of the first workload for each model, no variants")
    run("engine", body, made.parse_args())
