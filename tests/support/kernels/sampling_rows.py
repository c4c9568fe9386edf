"""Sampling parameters row by row, and the tokens that an exact sampler could draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from tidewheel_kernels import SamplingTensors
from tidewheel_kernels.launch_config import vocabulary_config

CHUNK = vocabulary_config(1).chunk
EPSILON = 1e-5  # relative error of a sum of float32 weights, generously


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Row(temperature=0.0)


def tensors(rows: list[Row], device: str = "cpu") -> SamplingTensors:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return SamplingTensors(
        temperature=torch.tensor(columns[0], device=device),
        top_k=torch.tensor(columns[1], dtype=torch.int32, device=device),
        top_p=torch.tensor(columns[2], device=device),
        min_p=torch.tensor(columns[3], device=device),
        any_sampled=any(row.temperature > 0 for row in rows),
        any_top_k=any(row.top_k > 0 for row in rows),
        any_top_p=any(row.top_p < 1 for row in rows),
        any_min_p=any(row.min_p > 0 for row in rows),
    )


@contextmanager
def little_room() -> Iterator[None]:
    """Let the kernels search rows with more than one chunk of candidates pass by pass."""
    from tidewheel_kernels.sampling import triton_kernels as kernels

    def config(vocabulary: int) -> object:
        return vocabulary_config(vocabulary)._replace(capacity=CHUNK)

    with mock.patch.object(kernels, "vocabulary_config", config):
        yield


def kept_weights(logits: np.ndarray, row: Row, top_p: float) -> np.ndarray:
    """Return [V] float64 weights of the kept tokens, by sorting; `top_p` replaces the row's."""
    weights = np.exp((logits - logits.max()) / row.temperature)
    if 0 < row.top_k < len(logits):
        weights = np.where(logits >= np.sort(logits)[-row.top_k], weights, 0.0)
    if row.top_p < 1:
        falling = np.sort(weights)[::-1]
        needed = int((np.cumsum(falling) - falling < top_p * weights.sum()).sum())
        weights = np.where(weights >= falling[max(needed, 1) - 1], weights, 0.0)
    return np.where(weights >= row.min_p * (1 - EPSILON), weights, 0.0)


def possible_draws(logits: torch.Tensor, row: Row, uniform: float) -> set[int]:
    """Return the tokens that a sampler may draw whose sums are off by EPSILON: one, except near a boundary."""
    values = logits.double().numpy()
    if row.temperature == 0:
        return {int(values.argmax())}
    possible = set()
    for top_p in {row.top_p * (1 - EPSILON), row.top_p, row.top_p * (1 + EPSILON)}:
        weights = kept_weights(values, row, top_p)
        cumulative = np.cumsum(weights)
        for shift in (-EPSILON, 0.0, EPSILON):
            target = min(max(uniform + shift, 0.0), 1 - EPSILON / 10) * cumulative[-1]
            possible.add(int(np.searchsorted(cumulative, target, side="right")))
    return possible
