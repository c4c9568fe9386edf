"""An engine process whose device is a formula: a step takes `$MODELLED_STEP_S` seconds.

`TIDEWHEEL_FAULTS=modelled.engine tidewheel serve --allow-faults` runs it in place of the engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from common.clocks import WallClock
from modelled.device import ModelledDevice, modelled_runner
from tidewheel.config import EngineConfig
from tidewheel.engine.build import Progress
from tidewheel.engine.process import exit_now, main
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import decode_sizes

MODULE = "modelled.engine"  # in `benchmarks/`
STEP = "MODELLED_STEP_S"
NUM_SLOTS = 1 << 24  # of the KV cache
MAX_MODEL_LEN = 1 << 16


def modelled(step_s: float) -> dict[str, str]:
    """Return variables of a `tidewheel serve --allow-faults` whose engine is this one."""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]))
    return {"TIDEWHEEL_FAULTS": MODULE, STEP: str(step_s), "PYTHONPATH": paths}


def load(config: EngineConfig, _progress: Progress | None = None) -> ModelRunner:
    runner = modelled_runner(
        ModelledDevice(WallClock()),
        decode_seconds=float(os.environ[STEP]),
        prefill_seconds=0.0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(MAX_MODEL_LEN, NUM_SLOTS // config.max_num_seqs),
        graph_sizes=decode_sizes(config.max_num_seqs),
    )
    runner.info = msgspec.structs.replace(runner.info, model=config.model)  # its folder has the tokenizer
    return runner


if __name__ == "__main__":
    exit_now(main(load=load))
