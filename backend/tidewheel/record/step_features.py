"""Contents of a step that decide how long it takes."""

from __future__ import annotations

from typing import NamedTuple

from tidewheel.batch import ScheduledBatch


class StepFeatures(NamedTuple):
    num_rows: int
    num_tokens: int
    num_samples: int
    num_new_rows: int
    kv_tokens: int  # cached tokens attention reads, over all rows
    chunk_pairs: int  # (query, key) pairs of chunks over one token


def step_features(batch: ScheduledBatch) -> StepFeatures:
    num_decodes, num_rows = batch.num_decodes, len(batch.rows)
    kv_tokens = int(batch.start_positions.sum()) + batch.num_tokens
    num_samples, chunk_pairs = num_decodes, 0
    if num_decodes < num_rows:
        num_samples += int(batch.samples[num_decodes:].sum())
        starts = batch.start_positions[num_decodes:].tolist()
        counts = batch.num_scheduled_tokens[num_decodes:].tolist()
        chunk_pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True))
    return StepFeatures(num_rows, batch.num_tokens, num_samples, len(batch.new_rows), kv_tokens, chunk_pairs)
