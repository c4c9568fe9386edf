"""Milliseconds of a decode step, a first token and a prompt, beside their limits."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from common.work_items import of_length
from gpu.engine_steps import DecodeStep, TimedLLM, limit_ratio, open_engine, warm_up
from gpu.measurements import duration, throughput
from gpu.stage import Stage, parser, run
from modelled.roofline import SHAPES, decode_seconds, prefill_seconds
from tidewheel_kernels.switches import is_on

BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (512, 2048, 8192)
PROMPTS = (512, 1024, 2048, 4096, 8192)
PACKED = (64, 1024)  # prompts, tokens each
NUM_STEPS = 48  # of each shape
REPEATS = 5
MARGIN = 512  # most tokens added to a context


class Goals(NamedTuple):
    """Decode steps by (batch, context), and the lone prompt, that have a goal."""

    decodes: tuple[tuple[int, int], ...]
    prompt: int = 8192


GOALS = {
    "qwen3-0.6b": Goals(((256, 512),)),
    "llama-3.1-8b": Goals(((128, 512),)),
    "tiny": Goals(((2, 16),), 64),
}


def goals(stage: Stage) -> None:
    """Measure what has a goal alone."""
    with tempfile.TemporaryDirectory() as scratch:
        for model in stage.models:
            chosen = GOALS[model]
            with (
                stage.part(f"latency, {model}"),
                open_engine(stage, model, Path(scratch), max_model_len=chosen.prompt + MARGIN) as engine,
            ):
                warm_up(engine, of_length(8, 64, 16, SHAPES[model].vocab), 0.0)
                for batch, context in chosen.decodes:
                    with stage.part(f"decode step, {model}, batch {batch}, context {context}"):
                        _decode(stage, model, engine, batch, context)
                _first_token(stage, model, engine, chosen.prompt)


def without_effect(stage: Stage) -> str | None:
    """Return why the switch `flash_prompts` would have no effect here; None if it is off or has one."""
    if not is_on("flash_prompts"):
        return None
    from tidewheel_kernels.attention.triton_flash import PromptCall, objection_here

    obstacle = objection_here(PromptCall(stage.device, torch.bfloat16, torch.bfloat16, 0.0))
    return obstacle and f"FlashAttention-3 {obstacle}"


def body(stage: Stage) -> None:
    if obstacle := without_effect(stage):
        stage.skip("flash_prompts", obstacle)
        return
    if stage.options.goals:
        goals(stage)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for model in stage.models:
            longest = max(_prompts(stage)) + MARGIN
            with (
                stage.part(f"latency, {model}"),
                open_engine(stage, model, Path(scratch), max_model_len=longest) as engine,
            ):
                warm_up(engine, of_length(8, 64, 16, SHAPES[model].vocab), 0.0)
                _first_tokens(stage, model, engine)
                _packed_prefill(stage, model, engine)
                _decodes(stage, model, engine)


def _prompts(stage: Stage) -> tuple[int, ...]:
    return (16, 64) if stage.is_dry else PROMPTS


def _first_tokens(stage: Stage, model: str, engine: TimedLLM) -> None:
    for length in _prompts(stage):
        _first_token(stage, model, engine, length)


def _first_token(stage: Stage, model: str, engine: TimedLLM, length: int) -> None:
    with stage.part(f"prompt of {length}, {model}"):
        stage.check_time(1.0)
        seconds = engine.prompt_seconds(length, SHAPES[model].vocab, 1 if stage.is_dry else REPEATS)
        least = prefill_seconds(SHAPES[model], [length], stage.ceilings)
        case = f"{model}, lone prompt of {length}"
        stage.result(duration("time to first token", case, seconds, least, details={"model": model}))
        stage.result(throughput("prefill", case, seconds, length, "tokens/s", length / least))


def _packed_prefill(stage: Stage, model: str, engine: TimedLLM) -> None:
    count, length = (4, 16) if stage.is_dry else PACKED
    shape = SHAPES[model]
    with stage.part(f"packed prefill, {model}"):
        stage.check_time(5.0)
        works = [of_length(count, length, 1, shape.vocab, seed=repeat) for repeat in range(2 if stage.is_dry else 4)]
        seconds = [engine.timed(work, 0.0).seconds for work in works][1:]
        most = count * length / prefill_seconds(shape, [length] * count, stage.ceilings)
        case = f"{model}, {count} prompts of {length}"
        stage.result(throughput("prefill", case, seconds, count * length, "tokens/s", most))


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
    shape = SHAPES[model]
    steps = NUM_STEPS * decode_seconds(shape, batch, context, stage.ceilings)
    return 2.0 * (prefill_seconds(shape, [context] * batch, stage.ceilings) + steps)


def _decode(stage: Stage, model: str, engine: TimedLLM, batch: int, context: int) -> None:
    """Time steps around `context`; prompts lack half the steps."""
    num_prefill_steps = -(-batch * context // engine.config.max_num_batched_tokens)
    num_steps = 8 if stage.is_dry else NUM_STEPS
    num_input = max(context - num_steps // 2, 1)
    work = of_length(batch, num_input, min(num_steps + num_prefill_steps + 4, MARGIN), SHAPES[model].vocab)
    steps = [step for step in engine.timed(work, 0.0).decode_steps() if step.batch == batch]
    if not steps:
        raise RuntimeError(f"no step decoded all {batch} requests")
    _report_steps(stage, model, batch, context, steps)


def _report_steps(stage: Stage, model: str, batch: int, context: int, steps: list[DecodeStep]) -> None:
    mean_context = statistics.mean(step.context for step in steps)
    least = decode_seconds(SHAPES[model], batch, mean_context, stage.ceilings)
    details = {
        "model": model,
        "batch": batch,
        "context": context,
        "mean_context": mean_context,
        "times_limit": limit_ratio(steps, SHAPES[model], stage.ceilings),
    }
    case = f"{model}, batch {batch}, context {context}"
    stage.result(duration("decode step", case, [step.seconds for step in steps], least, details=details))


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--goals", action="store_true", help="only what has a goal")
    run("latency", body, made.parse_args())
