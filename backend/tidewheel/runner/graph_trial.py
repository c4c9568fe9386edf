from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.models.trial_prompt import random_tokens
from tidewheel.request import Request
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.warm_up import GREEDY, sampling_batch

MOST_ROWS = 4
LENGTHS = (3, 17, 8, 30)
NUM_DECODES = 2
CPU = torch.device("cpu")


class GraphTrial(NamedTuple):
    """Steps that show whether a model supports CUDA graphs: prompts, then decodes at other positions.

    A replay at other positions must give the model's logits. The first decode
    runs under `no_waiting`: a wait would fail a capture.
    """

    prompts: list[ScheduledBatch]  # one for each row
    decodes: list[ScheduledBatch]  # of all rows
    num_blocks: int  # of the cache

    @classmethod
    def of(cls, info: RunnerInfo) -> GraphTrial | None:
        """Return None if the context is too short."""
        longest = min(max(LENGTHS), info.max_model_len - NUM_DECODES, info.max_num_batched_tokens)
        if longest < 1:
            return None
        num_rows = min(MOST_ROWS, info.max_num_seqs, info.max_num_batched_tokens)
        lengths = [min(length, longest) for length in LENGTHS[:num_rows]]
        per_row = -(-(longest + NUM_DECODES) // info.block_size)
        prompts = [_prompt(info, row, length, per_row) for row, length in enumerate(lengths)]
        decodes = [
            sampling_batch(range(num_rows), [length + done for length in lengths], [1] * num_rows)
            for done in range(NUM_DECODES)
        ]
        return cls(prompts, decodes, num_rows * per_row)


def _prompt(info: RunnerInfo, row: int, length: int, num_blocks: int) -> ScheduledBatch:
    tokens = random_tokens(length, info.vocab_size, CPU).numpy().astype(np.int32)
    request = Request("", tokens, GREEDY, max_tokens=1, arrival_time=0.0)
    indices = np.arange(num_blocks, dtype=np.int32)
    return sampling_batch(
        [row], [0], [length], new_rows=(NewRow(row, request, tokens, GREEDY),),
        block_rows=np.full_like(indices, row), block_indices=indices, block_ids=row * num_blocks + indices,
    )  # fmt: skip
