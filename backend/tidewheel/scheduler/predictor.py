"""Predicted output lengths, learned from outputs that have ended."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

import numpy as np
import numpy.typing as npt

QUANTILE = 0.5  # the median has the least mean absolute error
MAX_CELLS = 2048
MIN_SEEN = 8.0  # outputs in a cell before it is believed
NUM_KNOWN = 200  # ended outputs after which running ones tell nothing new

_FORGET = 0.99  # weight that an output keeps at the next one of its cell: about the last 100 count
_BINS_PER_OCTAVE = 4
_NUM_BINS = 21 * _BINS_PER_OCTAVE  # outputs up to 2^21 tokens
_MAX_SCALE = 1e12  # above it, the weights of a cell are scaled down
_ERROR_SMOOTHING = 0.01

_EDGES: list[float] = [2.0 ** (index / _BINS_PER_OCTAVE) for index in range(_NUM_BINS + 1)]  # bin i: [edge i, i + 1)
_LENGTHS = np.array(_EDGES)

_Cell = tuple[str | None, int | None]  # tenant and prompt bucket; None: all of them
_Floats = npt.NDArray[np.float64]


class Histogram:
    """Output lengths in bins a quarter of an octave wide; older outputs count less and less.

    Instead of fading all bins, each new output weighs 1 / `_FORGET` times the one before it.
    """

    __slots__ = ("_scale", "_total", "_weights")

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * _NUM_BINS))
        self._scale = 1.0  # weight of the newest output
        self._total = 0.0

    @property
    def num_seen(self) -> float:
        """Faded count: at most 1 / (1 - `_FORGET`)."""
        return self._total / self._scale

    @property
    def weights(self) -> _Floats:
        """Outputs in each bin, older ones faded."""
        return np.array(self._weights) / self._scale

    def add(self, length: int) -> None:
        if self._scale > _MAX_SCALE:
            self._weights = array("d", [weight / self._scale for weight in self._weights])
            self._total /= self._scale
            self._scale = 1.0
        self._scale /= _FORGET
        self._weights[bisect_left(_EDGES, length + 0.5, 1, _NUM_BINS) - 1] += self._scale
        self._total += self._scale

    def quantile(self, fraction: float) -> float:
        """Return the length that a `fraction`, above 0, of the outputs does not exceed; lengths in a bin are even."""
        sums = list(accumulate(self._weights))
        wanted = fraction * sums[-1]
        index = bisect_left(sums, wanted)
        weight = self._weights[index]
        inside = (wanted - (sums[index] - weight)) / weight
        return _EDGES[index] + inside * (_EDGES[index + 1] - _EDGES[index])


class OutputPredictor:
    """Predicts the median output length of similar requests: one tenant, one prompt length up to a factor of two.

    A cell that has seen fewer than `MIN_SEEN` outputs is skipped. The next ones asked are all prompts of the tenant,
    all tenants with that prompt length, all requests, and at last the prior. Outputs that were cut at `max_tokens`
    count with the length they had.

    Memory is bounded whatever tenants clients name: `MAX_CELLS` cells of 84 bins; the least recently used go first.
    """

    def __init__(self, prior_tokens: int) -> None:
        self._prior = float(prior_tokens)
        self._cells: OrderedDict[_Cell, Histogram] = OrderedDict()  # of tenants; least recently used first
        self._shared: dict[_Cell, Histogram] = {(None, None): Histogram()}  # of all tenants; one for each bucket
        self.num_observed = 0
        self.mean_abs_error = 0.0  # predicted to real length, tokens, smoothed over about the last 100 outputs

    def predict(self, tenant: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Return output tokens, 1 to `max_tokens`."""
        bucket = num_prompt_tokens.bit_length()
        for cells, key in (
            (self._cells, (tenant, bucket)),
            (self._cells, (tenant, None)),
            (self._shared, (None, bucket)),
            (self._shared, (None, None)),
        ):
            histogram = cells.get(key)
            if histogram is not None and histogram.num_seen >= MIN_SEEN:
                return min(histogram.quantile(QUANTILE), float(max_tokens))
        return min(self._prior, float(max_tokens))

    def survival(self, running: _Floats) -> tuple[_Floats, _Floats]:
        """Return output lengths, ascending, and the share of all outputs that is longer than each.

        The estimate of Kaplan and Meier (1958): requests that still run, at lengths `running`, count as outputs of at
        least that length. Without them the first outputs to end, the short ones, would stand for all. The more
        outputs have ended, the less the running ones add; from `NUM_KNOWN` on they add nothing. Until `MIN_SEEN`
        have ended, the prior fills up to as many, as outputs of a geometric length with twice its mean.
        """
        prior = np.diff(1.0 - np.exp(-_LENGTHS / (2.0 * self._prior)))
        ended = self._shared[None, None].weights + max(MIN_SEEN - self.num_observed, 0.0) * prior
        weight = max(1.0 - self.num_observed / NUM_KNOWN, 0.0)
        bins = np.searchsorted(_LENGTHS[1:-1], running, side="right")
        seen = ended + weight * np.bincount(bins, minlength=_NUM_BINS)
        at_risk = seen[::-1].cumsum()[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros(_NUM_BINS), where=at_risk > 0.0)
        return _LENGTHS, np.append(1.0, np.cumprod(1.0 - hazard))

    def observe(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int, predicted: float) -> None:
        """Learn from a request that ended by itself, and for which `predicted` tokens were expected."""
        for bucket in (num_prompt_tokens.bit_length(), None):
            cell = self._cells.pop((tenant, bucket), None) or Histogram()
            if len(self._cells) >= MAX_CELLS:
                self._cells.popitem(last=False)
            self._cells[tenant, bucket] = cell
            for histogram in (cell, self._shared.setdefault((None, bucket), Histogram())):
                histogram.add(num_output_tokens)
        self.num_observed += 1
        smoothing = max(_ERROR_SMOOTHING, 1.0 / self.num_observed)
        self.mean_abs_error += smoothing * (abs(predicted - num_output_tokens) - self.mean_abs_error)
