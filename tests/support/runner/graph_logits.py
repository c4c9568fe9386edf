"""Logits of steps that run as graphs, and of the same steps without.

Padding and the number of splits change the order of sums, so in bfloat16 rounding may choose other tokens. What it
does to logits is bounded by `TOLERANCE` of `tidewheel.models.trial_prompt`, as in the trial of graphs at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.models.trial_prompt import relative_difference
from tidewheel.runner.model_runner import ModelRunner


@contextmanager
def decode_differences() -> Iterator[list[float]]:
    """Yield the relative difference of the logits of each step that a graph of decodes replays."""
    found: list[float] = []
    replayed = ModelRunner._replayed

    def compared(self: ModelRunner, batch: ScheduledBatch, *arguments: Any) -> Any:
        computed, of_graph = self.logits_of_both(batch)
        found.append(relative_difference(of_graph, computed))
        return replayed(self, batch, *arguments)

    with mock.patch.object(ModelRunner, "_replayed", compared):
        yield found


@contextmanager
def sampled_logits() -> Iterator[list[torch.Tensor]]:
    """Yield the logits that each step samples from, unless a graph samples too."""
    found: list[torch.Tensor] = []
    sampled = ModelRunner._sampled

    def noted(self: ModelRunner, logits: torch.Tensor, *arguments: Any) -> Any:
        if len(logits):
            found.append(logits.float().to("cpu", copy=True))
        return sampled(self, logits, *arguments)

    with mock.patch.object(ModelRunner, "_sampled", noted):
        yield found
