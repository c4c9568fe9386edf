"""Trial of CUDA graphs, for models that may not support them.

A graph freezes host computation, so a replay at other positions must give the model's logits. The model first decodes
with waits for the device forbidden, because a wait would fail a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import DTYPES, Progress, no_progress
from tidewheel.models.model_folder import one_line
from tidewheel.models.trial_prompt import TOLERANCE, random_tokens, relative_difference
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.profiling import StepSize
from tidewheel.runner.step_graphs import GraphBytes, GraphSizes
from tidewheel.runner.warm_up import GREEDY, BatchRunner, sampling_batch

MOST_ROWS = 4
LENGTHS = (3, 17, 8, 30)
NUM_DECODES = 2
CPU = torch.device("cpu")


class TrialRunner(BatchRunner, Protocol):
    def capture(self, sizes: GraphSizes, progress: Progress) -> GraphBytes: ...

    def decode_without_waiting(self, batch: ScheduledBatch) -> None: ...

    def logits_of_both(self, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor]: ...


def trial_size(info: RunnerInfo) -> StepSize:
    longest = min(max(LENGTHS) + NUM_DECODES, info.max_model_len)
    return StepSize(min(MOST_ROWS, info.max_num_seqs, info.max_num_batched_tokens), longest)


def objection_to_graphs(runner: TrialRunner) -> str | None:
    """Return why the model must run without graphs, or None. The runner's cache must hold `trial_size`."""
    info = runner.info
    size = trial_size(info)
    longest = min(size.tokens_per_row - NUM_DECODES, info.max_num_batched_tokens)
    if longest < 1:
        return f"max_model_len is {info.max_model_len}, too short for a trial"
    lengths = [min(length, longest) for length in LENGTHS[: size.num_rows]]
    rows = range(size.num_rows)
    decodes = [
        sampling_batch(rows, [length + done for length in lengths], [1] * size.num_rows)
        for done in range(NUM_DECODES)
    ]
    try:
        _fill(runner, lengths, size.num_blocks(info.block_size))
        runner.decode_without_waiting(decodes[0])
        runner.capture(GraphSizes([size.num_rows]), no_progress)
        differences = [relative_difference(*runner.logits_of_both(decode)) for decode in decodes]
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Exception as error:  # layers may raise anything
        return f"no graph can hold a step: {one_line(error)}"
    limit = TOLERANCE[DTYPES[info.dtype]]
    if all(difference <= limit for difference in differences):  # NaN fails too
        return None
    return f"a replay changes its logits by {max(differences):.2g}, at most {limit} is right"


def _fill(runner: TrialRunner, lengths: Sequence[int], blocks_per_row: int) -> None:
    for row, length in enumerate(lengths):
        tokens = random_tokens(length, runner.info.vocab_size, CPU).numpy().astype(np.int32)
        blocks = np.arange(row * blocks_per_row, (row + 1) * blocks_per_row, dtype=np.int32)
        prompt = sampling_batch(
            [row], [0], [length], new_rows=(NewRow(row, "", tokens, length, GREEDY, 0, (), ()),),
            block_rows=np.full(blocks_per_row, row, dtype=np.int32),
            block_indices=np.arange(blocks_per_row, dtype=np.int32), block_ids=blocks,
        )  # fmt: skip
        runner.run(prompt)
