"""Output tokens/s on a CPU of random weights: the engine alone, through Triton, and transformers, in turns.

    python benchmarks cpu_engine --repeats 5 --save

`tidewheel bench --suite offline` on a model that is made first: all requests at once, of mixed lengths, greedy; ends
of sequence are ignored. transformers runs `generate_batch` in a process, and `generate` under Triton's own batcher.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from common.random_model import make_model
from common.study import BUILD, RESULTS, Study
from modelled.roofline import SHAPES
from tidewheel.cli.main import main as tidewheel

TARGETS = ("llm", "continuous", "transformers", "baseline_dynamic")


def main() -> None:
    study = Study("cpu_engine", __doc__)
    study.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    study.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    study.add_argument("--requests", type=int, default=64)
    study.add_argument("--repeats", type=int, default=3)
    options = study.begin()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / options.shape, SHAPES[options.shape], getattr(torch, options.dtype))
        command = ["bench", "--suite", "offline", "--model", str(folder), "--dtype", options.dtype]
        command += ["--workload", "mixed", "--requests", str(options.requests), "--repeats", str(options.repeats)]
        command += ["--set", "max_model_len=512", "--out", str(BUILD / "cpu_engine")]
        command += [argument for name in TARGETS for argument in ("--target", name)]
        command += ["--record", str(RESULTS / "cpu_engine.json")] if options.save else []
        sys.exit(tidewheel(command))


if __name__ == "__main__":
    main()
