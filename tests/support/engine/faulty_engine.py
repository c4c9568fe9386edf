"""An engine process without a model. Arguments: seconds that it lingers, then the arguments of the real one.

The model's name says how loading goes, the first token of a prompt what the device does when it sees the request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from support.engine.fake_runner import VOCAB_SIZE, FakeRunner, PendingTokens
from support.engine.lora_doubles import FakeLoraRunner
from tidewheel.batch import ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import Progress
from tidewheel.engine.process import exit_now, main
from tidewheel.engine.server import EngineServer
from tidewheel.errors import ConfigError
from tidewheel.runner.info import RunnerInfo

FAILS_TO_LOAD = "fails-to-load"
CRASHES_AT_LOAD = "crashes-at-load"
LOADS_FOREVER = "loads-forever"
READS = "reads:"  # a file, which holds one of the above or anything else

DIES, RAISES, HANGS = 37, 38, 39

MAX_MODEL_LEN = 4096
LAUNCH_SECONDS = 0.002  # a device takes its time: what is in flight stays so for a while


class FaultyRunner(FakeRunner, FakeLoraRunner):
    """A runner that misbehaves in the middle of a step, as the first token of a new request says."""

    def __init__(self, config: EngineConfig) -> None:
        block_size, num_blocks = config.block_size or 16, config.num_blocks or 1024
        FakeLoraRunner.__init__(self)
        FakeRunner.__init__(
            self,
            num_rows=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            token_budget=config.max_num_batched_tokens,
        )
        self.info = RunnerInfo(
            model=config.model,
            architecture="Fake",
            device="none",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN if config.max_model_len == "auto" else config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            weights_bytes=1 << 20,
            activation_bytes=1 << 20,
            kv_cache_bytes=1 << 20,
            load_seconds=0.0,
        )

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        time.sleep(LAUNCH_SECONDS)
        for new in batch.new_rows:
            match int(new.token_ids[0]):
                case token if token == DIES:
                    os.kill(os.getpid(), signal.SIGKILL)
                case token if token == RAISES:
                    raise RuntimeError("the device fell over")
                case token if token == HANGS:
                    while True:  # signals that ask for stacks end a pause
                        signal.pause()
        return super().launch(batch)

    def _attend(self, batch: ScheduledBatch) -> None:
        """Skip the check: its cost grows with the square of the length."""


def load(config: EngineConfig, progress: Progress) -> FaultyRunner:
    progress("weights", 0.5)
    name, _, file = config.model.partition(READS)
    how = name or Path(file).read_text()
    if how == FAILS_TO_LOAD:
        raise ConfigError("model.safetensors is missing: download it")
    if how == CRASHES_AT_LOAD:
        raise RuntimeError("the loader fell over")
    if how == LOADS_FOREVER:
        signal.pause()
    return FaultyRunner(config)


def prompt_bytes(*token_ids: int) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()


if __name__ == "__main__":
    EngineServer.linger_s = float(sys.argv[1])
    exit_now(main(sys.argv[2:], load=load))
