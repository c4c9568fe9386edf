"""Preemption: swapping a request back against computing it again, and the scheduler's choice.

Per context, one swap out and in of its blocks, and one prefill; then a workload beyond the cache, with either way
forced and with the cost model's choice.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch

from common.work_items import of_length
from gpu.engine_steps import open_engine, warm_up
from gpu.kernel_copies import BLOCK_SIZE, layout_of
from gpu.measurements import Measurement, throughput
from gpu.stage import Stage, parser, run
from modelled.roofline import SHAPES
from tidewheel.runner.host_tier import HostBlocks
from tidewheel.runner.kv_tensors import KVTensors

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
            stage.check_time(12.0)
            _ways_back(stage, model, Path(scratch))
        for mode in MODES:
            with stage.part(f"preemption by {mode}, {model}"):
                stage.check_time(15.0)
                _workload(stage, model, Path(scratch), mode)


def _ways_back(stage: Stage, model: str, folder: Path) -> None:
    contexts, repeats = ((16, 64), 2) if stage.is_dry else (CONTEXTS, REPEATS)
    settings = {
        "max_model_len": max(contexts) + 64,
        "gpu_memory_utilization": 0.7,
        "enable_prefix_caching": True,
        "swap_space": 0.01 if stage.is_dry else 1.0,
    }
    with open_engine(stage, model, folder, **settings) as engine:
        vocab = SHAPES[model].vocab
        recompute = {context: engine.prompt_seconds(context, vocab, repeats) for context in contexts}
        per_block, block_size = engine.info.swap_seconds_per_block or 0.0, engine.info.block_size
    for context, computed in recompute.items():
        swapped = [_swap_seconds(stage, model, context) for _ in range(repeats)]
        predicted = 2.0 * -(-context // block_size) * per_block
        measured = Measurement(
            name="recompute over swap",
            case=f"{model}, {context} tokens",
            value=statistics.median(computed) / statistics.median(swapped),
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
        stage.result(measured)


def _swap_seconds(stage: Stage, model: str, context: int) -> float:
    count = -(-context // BLOCK_SIZE)
    host = HostBlocks(KVTensors(layout_of(SHAPES[model]), count, stage.device), count)
    ids = torch.arange(count, dtype=torch.int32).numpy()
    host.write_out(ids, ids)

    def there_and_back() -> None:
        host.write_out(ids, ids)
        host.read_in(ids, ids)

    return stage.clocked(there_and_back)


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
    vocab = SHAPES[model].vocab
    with open_engine(stage, model, folder, **settings) as engine:
        warm_up(engine, of_length(4, num_input, num_output, vocab, seed=7), 0.0)
        before = engine.stats()
        timed = engine.timed(of_length(count, num_input, num_output, vocab), 0.0)
        after = engine.stats()
    details = {
        "preemptions": after.num_preemptions - before.num_preemptions,
        "by_swap": after.num_swap_preemptions - before.num_swap_preemptions,
        "mode": mode,
    }
    case = f"{model}, {count} requests in {ROOM:.0%} of their room"
    facts = {"who": f"by {mode}", "details": details}
    stage.result(
        throughput("preemption", case, [timed.seconds], count * num_output, "output tokens/s", None, **facts)
    )


if __name__ == "__main__":
    run("swap", body, parser(__doc__).parse_args())
