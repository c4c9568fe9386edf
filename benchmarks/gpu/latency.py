"""Milliseconds of a decode step, a first token and a prompt, beside their limits.

python -m gpu.latency
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from gpu.engine_steps import DecodeStep, TimedLLM, limit_ratio, open_engine, warm_up
from gpu.limits import decode_seconds, prefill_seconds
from gpu.models import limits_of, shape_of
from gpu.stage import Stage, parser, run
from gpu.values import duration, throughput
from gpu.work import of_length

BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (512, 2048, 8192)
PROMPTS = (512, 1024, 2048, 4096, 8192)
PACKED = (64, 1024)  # prompts, tokens each
NUM_STEPS = 48  # of each shape
REPEATS = 5
MARGIN = 512  # most tokens added to a context


def body(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for model in stage.models:
            with stage.part(f"latency, {model}"):
                longest = max(_prompts(stage))
                engine = open_engine(stage, model, Path(scratch), max_model_len=longest + MARGIN)
                try:
                    warm_up(engine, of_length(8, 64, 16, shape_of(model).vocab), 0.0)
                    _first_tokens(stage, model, engine)
                    _packed_prefill(stage, model, engine)
                    _decodes(stage, model, engine)
                finally:
                    engine.close()


def _prompts(stage: Stage) -> tuple[int, ...]:
    return (16, 64) if stage.is_dry else PROMPTS


def _first_tokens(stage: Stage, model: str, engine: TimedLLM) -> None:
    shape, device = limits_of(model), stage.ceilings.device
    for length in _prompts(stage):
        with stage.part(f"prompt of {length}, {model}"):
            stage.check_time(1.0)
            seconds = []
            for repeat in range(1 + (1 if stage.is_dry else REPEATS)):
                timed = engine.timed(of_length(1, length, 1, shape_of(model).vocab, seed=repeat), 0.0)
                seconds.append(timed.first_token_seconds()[0])
            del seconds[0]
            least = prefill_seconds(shape, [length], device)
            case = f"{model}, lone prompt of {length}"
            stage.result(duration("time to first token", case, seconds, least, details={"model": model}))
            stage.result(throughput("prefill", case, seconds, length, "tokens/s", length / least))


def _packed_prefill(stage: Stage, model: str, engine: TimedLLM) -> None:
    """Time many prompts for one token each, in full steps."""
    count, length = (4, 16) if stage.is_dry else PACKED
    with stage.part(f"packed prefill, {model}"):
        stage.check_time(0.0 if stage.is_dry else 5.0)
        vocab = shape_of(model).vocab
        works = [of_length(count, length, 1, vocab, seed=repeat) for repeat in range(2 if stage.is_dry else 4)]
        seconds = [engine.timed(work, 0.0).seconds for work in works][1:]
        fastest = count * length / prefill_seconds(limits_of(model), [length] * count, stage.ceilings.device)
        case = f"{model}, {count} prompts of {length}"
        stage.result(throughput("prefill", case, seconds, count * length, "tokens/s", fastest))


def _decodes(stage: Stage, model: str, engine: TimedLLM) -> None:
    room = engine.info.num_blocks * engine.info.block_size
    contexts = (16, 64) if stage.is_dry else CONTEXTS
    for context in contexts:
        for batch in (1, 2) if stage.is_dry else BATCHES:
            what = f"decode step, {model}, batch {batch}, context {context}"
            if batch * (context + MARGIN // 2) > room:
                stage.skip(what, f"the cache has room for {room} tokens")
                continue
            with stage.part(what):
                stage.check_time(0.5 + _seconds_needed(stage, model, batch, context))
                _decode(stage, model, engine, batch, context)


def _seconds_needed(stage: Stage, model: str, batch: int, context: int) -> float:
    """Return the seconds at twice the limits."""
    if stage.is_dry:
        return 0.0
    shape, device = limits_of(model), stage.ceilings.device
    steps = NUM_STEPS * decode_seconds(shape, batch, context, device)
    return 2.0 * (prefill_seconds(shape, [context] * batch, device) + steps)


def _decode(stage: Stage, model: str, engine: TimedLLM, batch: int, context: int) -> None:
    """Time steps around `context`; prompts lack half the steps."""
    num_prefill_steps = -(-batch * context // engine.config.max_num_batched_tokens)
    num_steps = 8 if stage.is_dry else NUM_STEPS
    num_input = max(context - num_steps // 2, 1)
    work = of_length(batch, num_input, min(num_steps + num_prefill_steps + 4, MARGIN), shape_of(model).vocab)
    timed = engine.timed(work, 0.0)
    steps = [step for step in timed.decode_steps() if step.batch == batch]
    if not steps:
        raise RuntimeError(f"no step decoded all {batch} requests")
    _report_steps(stage, model, batch, context, steps)


def _report_steps(stage: Stage, model: str, batch: int, context: int, steps: list[DecodeStep]) -> None:
    shape, device = limits_of(model), stage.ceilings.device
    mean_context = statistics.mean(step.context for step in steps)
    stage.result(
        duration(
            "decode step",
            f"{model}, batch {batch}, context {context}",
            [step.seconds for step in steps],
            decode_seconds(shape, batch, mean_context, device),
            details={
                "model": model,
                "batch": batch,
                "context": context,
                "mean_context": mean_context,
                "times_limit": limit_ratio(steps, shape, device),
            },
        )
    )


def main() -> None:
    run("latency", body, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
