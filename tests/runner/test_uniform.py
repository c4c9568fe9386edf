"""The random numbers of a request depend on its seed and position only, and are uniform."""

from __future__ import annotations

import numpy as np

from tidewheel.runner.sampling_plan import uniform


def test_numbers_lie_in_the_unit_interval_and_fill_it() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 1000)
    numbers = uniform(seeds, np.tile(np.arange(1000), 100))
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = len(numbers) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 104  # 63 degrees of freedom, p = 0.001


def test_neighbours_are_not_correlated() -> None:
    count = 50_000
    positions = np.arange(count)
    one = uniform(np.full(count, 1, dtype=np.uint64), positions)
    two = uniform(np.full(count, 2, dtype=np.uint64), positions)
    limit = 4 / np.sqrt(count)
    assert abs(np.corrcoef(one, two)[0, 1]) < limit
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < limit


def test_a_number_does_not_depend_on_its_batch() -> None:
    seeds = np.array([0, 7, 2**64 - 1, 7], dtype=np.uint64)
    positions = np.array([5, 0, 3, 2**31 - 1], dtype=np.int32)
    together = uniform(seeds, positions)
    for i in range(len(seeds)):
        assert uniform(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert len(set(together.tolist())) == 4
