"""Decoding by two ranks of a model of 151,936 tokens, by what sampling needs of the logits, against another checkout.

    python benchmarks rank_logits --before CHECKOUT --save

The shape is Qwen3-0.6B's, with random weights whose last norm is scaled so that logits are as peaked as a trained
model's. `gathered_bytes` are those of all ranks' parts, for a step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from common.random_model import weights, without_weights
from common.study import ROOT, Study, commit_of, in_turns, run_in, show, summary
from modelled.roofline import SHAPES
from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner.rank_group import load_group
from tidewheel.runner.warm_up import sampling_batch
from tidewheel.sampling import SamplingParams

SHAPE, NORM_SCALE, NUM_RANKS = SHAPES["qwen3-0.6b"], 8.0, 2
PROMPT, NUM_WARM_UP, NUM_STEPS, BLOCK = 16, 2, 10, 16
BLOCKS_PER_ROW = -(-(PROMPT + NUM_WARM_UP + NUM_STEPS + 1) // BLOCK)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "no filter": {"temperature": 1.0},
    "penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
}


def make_peaked(folder: Path) -> None:
    without_weights(folder, SHAPE)
    tensors = dict(weights(SHAPE, torch.bfloat16, 0))
    tensors["model.norm.weight"] *= NORM_SCALE
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prompts(num_rows: int, sampling: SamplingParams) -> ScheduledBatch:
    """Return the first step, of all prompts, which takes the blocks of all steps."""
    rows, tokens = np.arange(num_rows, dtype=np.int32), np.random.default_rng(0).integers(4, 9999, (num_rows, PROMPT))
    requests = [
        Request("", ids.astype(np.int32), sampling, max_tokens=99, arrival_time=0.0, seed=i)
        for i, ids in enumerate(tokens)
    ]
    return sampling_batch(
        range(num_rows), [0] * num_rows, [PROMPT] * num_rows,
        new_rows=tuple(NewRow(i, each, each.prompt_token_ids, sampling) for i, each in enumerate(requests)),
        freed_rows=rows,
        block_rows=np.repeat(rows, BLOCKS_PER_ROW), block_ids=np.arange(num_rows * BLOCKS_PER_ROW, dtype=np.int32),
        block_indices=np.tile(np.arange(BLOCKS_PER_ROW, dtype=np.int32), num_rows),
    )  # fmt: skip


def measured(folder: Path, num_rows: int) -> dict[str, dict[str, float]]:
    config = EngineConfig.from_settings(
        {
            "model": str(folder), "device": "cpu", "tensor_parallel_size": NUM_RANKS, "max_num_seqs": num_rows,
            "num_blocks": num_rows * BLOCKS_PER_ROW, "block_size": BLOCK, "max_model_len": BLOCKS_PER_ROW * BLOCK,
        }
    )  # fmt: skip
    runner, gathered = load_group(config, None), [0]
    kind = type(runner._shard.collectives)
    gather = kind.all_gather

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        gathered[0] += x.nbytes * NUM_RANKS
        return gather(self, x)

    kind.all_gather = counted
    found = {}
    try:
        for name, way in WAYS.items():
            runner.run(prompts(num_rows, SamplingParams(**way)))
            starts = [PROMPT + number for number in range(NUM_WARM_UP + NUM_STEPS)]
            for number, start in enumerate(starts):
                if number == NUM_WARM_UP:
                    began, gathered[0] = time.perf_counter(), 0
                runner.run(sampling_batch(range(num_rows), [start] * num_rows, [1] * num_rows))
            seconds = time.perf_counter() - began
            found[name] = {
                "tokens_per_s": num_rows * NUM_STEPS / seconds,
                "step_ms": 1e3 * seconds / NUM_STEPS,
                "gathered_bytes": gathered[0] / NUM_STEPS,
            }
    finally:
        runner.close()
    return found


def main() -> None:
    study = Study("rank_logits", __doc__, "torch")
    study.add_argument("--before", type=Path, help="checkout to compare with")
    study.add_argument("--rows", type=int, default=16, help="of a step")
    study.add_argument("--repeats", type=int, default=3)
    study.add_argument("--child", type=Path, help="measure a model in this folder once")
    options = study.begin()
    if options.child:
        json.dump(measured(options.child, options.rows), sys.stdout)
        return
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    with tempfile.TemporaryDirectory() as folder:
        make_peaked(Path(folder))
        command = ["rank_logits", "--child", folder, "--rows", str(options.rows)]
        runs = in_turns(
            {name: lambda path=path: run_in(path, command) for name, path in checkouts.items()},
            options.repeats, warm_up=0,
        )  # fmt: skip
    found = {
        way: {
            name: {key: summary([each[way][key] for each in results]) for key in results[0][way]}
            for name, results in runs.items()
        }
        for way in WAYS
    }
    show(
        {"sampling": way, "checkout": name, **{key: round(value["median"], 1) for key, value in figures.items()}}
        for way, each in found.items()
        for name, figures in each.items()
    )
    commits = {name: commit_of(path) for name, path in checkouts.items()}
    study.save({"rows": options.rows, "commits": commits, "ways": found})


if __name__ == "__main__":
    main()
