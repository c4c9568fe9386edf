"""Random numbers as a pure function of (seed, position), independent of the batch.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") on the finaliser of
SplitMix64 (Steele, Lea and Flood 2014). It has no state and draws the same after a preemption.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Float32Array

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MANTISSA_BITS = 24


def uniform(seeds: UInt64Array, positions: npt.NDArray[np.integer[Any]]) -> Float32Array:
    """Return [n] float32 in [0, 1) for the token at `positions[i]` of a request with `seeds[i]`."""
    counters = positions.astype(np.uint64) * _GOLDEN
    bits = _mixed(_mixed(seeds + _GOLDEN) + counters)
    return (bits >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float32) * np.float32(2.0**-_MANTISSA_BITS)


def _mixed(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
