"""How much of a row the sampling kernel rereads for its filters, counted in numpy on random logits.

    python benchmarks filter_candidates

Logits are normal with standard deviation `spread`; eight get `peak` on top. docs/kernels.md, "Sampling".
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from common.study import show
from tidewheel_kernels.launch_config import vocabulary_config


class Filters(NamedTuple):
    temperature: float
    top_k: int
    top_p: float


class Reads(NamedTuple):
    chunks: int
    candidates: int
    passes: int  # over the whole row; 0 if the candidates fit
    kept: int


FILTERS = (Filters(0.6, 20, 0.95), Filters(1.0, 50, 1.0), Filters(0.6, 0, 0.9), Filters(1.0, 0, 0.9))
SHAPED = ((1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (2.0, 12.0))  # (spread, peak)


def reads(logits: np.ndarray, filters: Filters) -> Reads:
    config = vocabulary_config(len(logits))
    padding = config.num_chunks * config.chunk - len(logits)
    maxima = np.pad(logits, (0, padding), constant_values=-np.inf).reshape(-1, config.chunk).max(axis=1)
    weights = np.exp((logits - logits.max()) / filters.temperature)
    if filters.top_k:
        bound = np.sort(maxima)[-filters.top_k]
    else:
        bound = logits.max() - filters.temperature * np.log(len(logits) / ((1 - filters.top_p) * weights.sum()))
    candidates = int((logits >= bound).sum())
    if filters.top_k:
        weights = np.where(logits >= np.sort(logits)[-filters.top_k], weights, 0.0)
    threshold, passes = search(logits, weights, bound, filters.top_p * weights.sum())
    fits = candidates <= config.capacity
    return Reads(int((maxima >= bound).sum()), candidates, 0 if fits else passes, int((logits >= threshold).sum()))


def search(logits: np.ndarray, weights: np.ndarray, low: np.float32, target: float) -> tuple[np.float32, int]:
    """Return the largest logit with `target` of the weight at or above it, and the halvings made."""
    high, passes = logits.max(), 0
    while low < high:
        passes += 1
        pivot = np.float32(low / 2 + high / 2)
        pivot = pivot if pivot > low else high
        above = logits >= pivot
        if weights[above].sum() >= target:
            low = logits[above].min()
        else:
            high = max(logits[~above].max(), low)
    return low, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    medians = []
    for spread, peak in SHAPED:
        rows = (rng.standard_normal((options.rows, options.vocabulary)) * spread).astype(np.float32)
        for row in rows:
            row[rng.integers(options.vocabulary, size=8)] += np.float32(peak)
        for filters in FILTERS:
            found = np.median([reads(row, filters) for row in rows], axis=0).astype(int).tolist()
            medians.append({"spread": spread, "peak": peak, **filters._asdict(), **Reads(*found)._asdict()})
    show(medians)


if __name__ == "__main__":
    main()
