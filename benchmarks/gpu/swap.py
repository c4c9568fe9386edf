"""Preemption: swapping a request back against computing it again, and the scheduler's choice.

    python -m gpu.swap

Per context, one swap out and in of its blocks, and one prefill; then a workload beyond the cache, with either way
forced and with the cost model's choice.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from gpu.engine_steps import TimedLLM, open_engine, warm_up
from gpu.kernel_copies import BLOCK_SIZE, layout_of
from gpu.models import limits_of, shape_of
from gpu.stage import Stage, parser, run
from gpu.values import Measurement, throughput
from gpu.work import of_length
from tidewheel.runner.host_slots import HostBlocks
from tidewheel.runner.kv_tensors import KVTensors
from workload import WorkItem

CONTEXTS = (512, 2048, 8192)
REPEATS = 5
COUNT, NUM_INPUT, NUM_OUTPUT = 96, 1024, 512
ROOM = 0.6
MODES = ("recompute", "swap", "auto")
SWAP_GIB = 8.0


def body(stage: Stage) -> None:
    model = stage.models[-1]
    with tempfile.TemporaryDirectory() as scratch:
        with stage.part(f"ways back, {model}"):
            stage.check_time(0.0 if stage.is_dry else 12.0)
            _ways_back(stage, model, Path(scratch))
        for mode in MODES:
            with stage.part(f"preemption by {mode}, {model}"):
                stage.check_time(0.0 if stage.is_dry else 15.0)
                _workload(stage, model, Path(scratch), mode)


def _ways_back(stage: Stage, model: str, folder: Path) -> None:
    contexts = (16, 64) if stage.is_dry else CONTEXTS
    settings = {"enable_prefix_caching": True, "swap_space": 0.01 if stage.is_dry else 1.0}
    engine = open_engine(
        stage, model, folder, max_model_len=max(contexts) + 64, gpu_memory_utilization=0.7, **settings
    )
    try:
        recompute = {context: _prefill_seconds(stage, engine, model, context) for context in contexts}
        per_block, block_size = engine.info.swap_seconds_per_block or 0.0, engine.info.block_size
    finally:
        engine.close()
    for context, computed in recompute.items():
        swapped = [_swap_seconds(stage, model, context) for _ in range(2 if stage.is_dry else REPEATS)]
        ratio = statistics.median(computed) / statistics.median(swapped)
        predicted = 2.0 * -(-context // block_size) * per_block
        stage.result(
            Measurement(
                name="recompute over swap",
                case=f"{model}, {context} tokens",
                value=ratio,
                unit="x",
                samples=[*computed, *swapped],
                sample_unit="s, recompute first, then swap",
                details={
                    "context": context,
                    "recompute_s": computed,
                    "swap_s": swapped,
                    "swap_s_by_cost_model": predicted,
                    "cost_model_swaps": predicted < statistics.median(computed),
                },
            )
        )


def _prefill_seconds(stage: Stage, engine: TimedLLM, model: str, context: int) -> list[float]:
    vocab = shape_of(model).vocab
    works = [of_length(1, context, 1, vocab, seed=seed) for seed in range(1 + (2 if stage.is_dry else REPEATS))]
    return [engine.timed(work, 0.0).first_token_seconds()[0] for work in works][1:]


def _swap_seconds(stage: Stage, model: str, context: int) -> float:
    count = -(-context // BLOCK_SIZE)
    host = HostBlocks(KVTensors(layout_of(limits_of(model)), count, stage.device), count)
    ids = torch.arange(count, dtype=torch.int32).numpy()
    host.write_out(ids, ids)
    _synchronise(stage)
    start = time.perf_counter()
    host.write_out(ids, ids)
    host.read_in(ids, ids)
    _synchronise(stage)
    return time.perf_counter() - start


def _synchronise(stage: Stage) -> None:
    if stage.is_cuda:
        torch.cuda.synchronize(stage.device)


def _workload(stage: Stage, model: str, folder: Path, mode: str) -> None:
    count, num_input, num_output = (4, 16, 32) if stage.is_dry else (COUNT, NUM_INPUT, NUM_OUTPUT)
    block_size = 16 if stage.is_dry else BLOCK_SIZE
    needed = count * -(-(num_input + num_output) // block_size)
    settings = {
        "preemption_mode": mode,
        "enable_prefix_caching": True,  # the host tier needs contents
        "swap_space": 0.0 if mode == "recompute" else 0.01 if stage.is_dry else SWAP_GIB,
        "max_model_len": num_input + num_output,
        "num_blocks": max(round(ROOM * needed), needed // count),
        "block_size": block_size,
    }
    if stage.is_dry:
        settings["kv_cache_memory_mb"] = None
    engine = open_engine(stage, model, folder, **settings)
    try:
        warm_up(engine, of_length(4, num_input, num_output, shape_of(model).vocab, seed=7), 0.0)
        before = engine.stats()
        work: list[WorkItem] = of_length(count, num_input, num_output, shape_of(model).vocab)
        timed = engine.timed(work, 0.0)
        after = engine.stats()
    finally:
        engine.close()
    details = {
        "preemptions": after.num_preemptions - before.num_preemptions,
        "by_swap": after.num_swap_preemptions - before.num_swap_preemptions,
        "mode": mode,
    }
    case = f"{model}, {count} requests in {ROOM:.0%} of their room"
    seconds = [timed.seconds]
    stage.result(
        throughput(
            "preemption",
            case,
            seconds,
            count * num_output,
            "output tokens/s",
            None,
            who=f"by {mode}",
            details=details,
        )
    )


def main() -> None:
    run("swap", body, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
