"""Output tokens per second in-process, beside the speed of light and with parts switched off.

    python -m gpu.engine

256 requests of 100 to 1,024 tokens in and out, and 1,000 of ShareGPT-like lengths, all waiting at the start; random
weights, bfloat16, temperature 0.6, end of sequence ignored.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.engine_steps import OFFLINE, Timed, TimedLLM, limit_ratio, open_engine, warm_up
from gpu.limits import workload_seconds
from gpu.models import limits_of, shape_of
from gpu.stage import Stage, parser, run
from gpu.streams import IN_PROCESS, report_streams
from gpu.values import Measurement, duration, throughput
from gpu.work import TEMPERATURE, headline, sharegpt, within_vocabulary
from tidewheel.errors import ConfigError
from workload import WorkItem

HEADLINE, SHAREGPT = "256 requests, 100-1024 in and out", "1000 requests, ShareGPT-like lengths"
REPEATS = {"qwen3-0.6b": 3}  # others: 2
VARIANTS = (
    ("without overlap", {"async_scheduling": False}),
    ("without CUDA graphs", {"enforce_eager": True}),
)
NEEDS_S = {"qwen3-0.6b": 12.0, "llama-3.1-8b": 30.0}  # of one run with its start, at most


def headline_work(stage: Stage, model: str) -> list[WorkItem]:
    return within_vocabulary(headline(4, 4, 16) if stage.is_dry else headline(), shape_of(model).vocab)


def sharegpt_work(stage: Stage, model: str) -> list[WorkItem]:
    work = [WorkItem(item.input_ids[:16], 4) for item in sharegpt(4)] if stage.is_dry else sharegpt()
    return within_vocabulary(work, shape_of(model).vocab)


def report(
    stage: Stage, model: str, workload: str, work: list[WorkItem], seconds: list[float], who: str, **details: object
) -> None:
    lengths = [(len(item.input_ids), item.num_output_tokens) for item in work]
    num_output = sum(output for _, output in lengths)
    max_num_seqs = OFFLINE["max_num_seqs"]
    assert isinstance(max_num_seqs, int)
    fastest = workload_seconds(limits_of(model), lengths, max_num_seqs, stage.ceilings.device)
    facts = {"workload": workload, "model": model, "num_output_tokens": num_output, **details}
    stage.result(
        throughput(
            "engine throughput", f"{model}, {workload}", seconds, num_output, "output tokens/s", num_output / fastest,
            who=who, details=facts,
        )
    )  # fmt: skip


def report_in_process(stage: Stage, model: str, timed: Timed, work: list[WorkItem]) -> None:
    num_tokens = sum(item.num_output_tokens for item in work)
    report_streams(stage, model, IN_PROCESS, num_tokens, timed.seconds, timed.gaps(), timed.first_token_seconds())


def _steps(stage: Stage, model: str, workload: str, timed: Timed) -> None:
    steps = timed.decode_steps()
    if not steps:
        stage.skip(f"decode steps, {model}, {workload}", "no step was a decode only")
        return
    ratio = limit_ratio(steps, limits_of(model), stage.ceilings.device)
    stage.result(
        Measurement(
            name="decode steps over limit",
            case=f"{model}, {workload}",
            value=ratio,
            unit="x",
            samples=[step.seconds for step in steps],
            sample_unit="s",
            percent=100.0 / ratio,
            details={"batch": [step.batch for step in steps], "context": [round(step.context) for step in steps]},
        )
    )


def _main_engine(stage: Stage, model: str, folder: Path) -> None:
    engine = open_engine(stage, model, folder)
    try:
        work = headline_work(stage, model)
        warm_up(engine, work, TEMPERATURE)
        runs = [engine.timed(work, TEMPERATURE) for _ in range(1 if stage.is_dry else REPEATS.get(model, 2))]
        report(stage, model, HEADLINE, work, [timed.seconds for timed in runs], "tidewheel")
        _steps(stage, model, HEADLINE, runs[-1])
        report_in_process(stage, model, runs[-1], work)
        with stage.part(f"{model}, {SHAREGPT}"):
            stage.check_time(0.0 if stage.is_dry else NEEDS_S[model])
            _sharegpt(stage, model, engine)
    finally:
        engine.close()


def _sharegpt(stage: Stage, model: str, engine: TimedLLM) -> None:
    work = sharegpt_work(stage, model)
    timed = engine.timed(work, TEMPERATURE)
    report(stage, model, SHAREGPT, work, [timed.seconds], "tidewheel")
    first = timed.first_token_seconds()
    stage.result(duration("time to first token", f"{model}, {SHAREGPT}, all at once", first, None))


def _variant(stage: Stage, model: str, folder: Path, who: str, settings: dict[str, bool]) -> None:
    try:
        engine = open_engine(stage, model, folder, **settings)
    except ConfigError as error:
        stage.skip(f"{model} {who}", str(error))
        return
    try:
        work = headline_work(stage, model)
        warm_up(engine, work, TEMPERATURE)
        seconds = [engine.timed(work, TEMPERATURE).seconds]
        report(stage, model, HEADLINE, work, seconds, f"tidewheel {who}")
    finally:
        engine.close()


def body(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for model in stage.models:
            with stage.part(f"engine throughput, {model}"):
                _main_engine(stage, model, folder)
        for model in stage.models:
            for who, settings in VARIANTS:
                needs_s = 0.0 if stage.is_dry else NEEDS_S[model]
                with stage.part(f"{model} {who}"):
                    stage.check_time(needs_s)
                    _variant(stage, model, folder, who, settings)


def main() -> None:
    run("engine", body, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
