from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

import numpy as np
import numpy.typing as npt

QUANTILE = 0.5  # least mean absolute error
MAX_CELLS = 2048
MIN_SEEN = 8.0  # outputs before a cell counts
NUM_KNOWN = 200  # outputs after which running ones are ignored

_FORGET = 0.99  # per output: about the last 100 count
_BINS_PER_OCTAVE = 4
_NUM_BINS = 21 * _BINS_PER_OCTAVE  # up to 2^21 tokens
_MAX_SCALE = 1e12
_ERROR_SMOOTHING = 0.01

_EDGES: list[float] = [2.0 ** (index / _BINS_PER_OCTAVE) for index in range(_NUM_BINS + 1)]  # bin i: [edge i, i + 1)
_LENGTHS = np.array(_EDGES)

_Cell = tuple[str | None, int | None]  # tenant and prompt bucket; None: all
_Floats = npt.NDArray[np.float64]


class LengthHistogram:
    """Output lengths in quarter-octave bins. Each weighs 1 / `_FORGET` times the last, so that old ones fade."""

    __slots__ = ("_scale", "_total", "_weights")

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * _NUM_BINS))
        self._scale = 1.0  # weight of the newest output
        self._total = 0.0

    @property
    def num_seen(self) -> float:
        """Faded count, at most 1 / (1 - `_FORGET`)."""
        return self._total / self._scale

    @property
    def weights(self) -> _Floats:
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
        """Return the length that a fraction > 0 does not exceed, linear within bins."""
        sums = list(accumulate(self._weights))
        wanted = fraction * sums[-1]
        index = bisect_left(sums, wanted)
        weight = self._weights[index]
        inside = (wanted - (sums[index] - weight)) / weight
        return _EDGES[index] + inside * (_EDGES[index + 1] - _EDGES[index])


class OutputPredictor:
    """Median output length by tenant and prompt length. Beyond `max_cells` the least recently used is dropped."""

    def __init__(self, prior_tokens: int, *, quantile: float = QUANTILE, max_cells: int = MAX_CELLS) -> None:
        self._quantile = quantile
        self._max_cells = max_cells
        self.prior = float(prior_tokens)  # tokens
        self._cells: OrderedDict[_Cell, LengthHistogram] = OrderedDict()  # least recently used first
        self._shared: dict[_Cell, LengthHistogram] = {(None, None): LengthHistogram()}  # all tenants, by bucket
        self.num_observed = 0
        self.mean_abs_error = 0.0  # in tokens, over about the last 100 outputs

    def predict(self, tenant: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Return output tokens in [1, `max_tokens`]."""
        bucket = num_prompt_tokens.bit_length()
        for cells, key in (
            (self._cells, (tenant, bucket)),
            (self._cells, (tenant, None)),
            (self._shared, (None, bucket)),
            (self._shared, (None, None)),
        ):
            histogram = cells.get(key)
            if histogram is not None and histogram.num_seen >= MIN_SEEN:
                return min(histogram.quantile(self._quantile), float(max_tokens))
        return min(self.prior, float(max_tokens))

    def survival(self, running: _Floats) -> tuple[_Floats, _Floats]:
        """Return ascending output lengths and the share of outputs longer than each (Kaplan-Meier estimate, 1958).

        Running requests count as outputs of at least their length, or the first, short outputs would stand for all.
        Their weight falls to 0 at `NUM_KNOWN` ended outputs. Below `MIN_SEEN`, the prior fills in: geometric lengths
        with twice its mean.
        """
        prior = np.diff(1.0 - np.exp(-_LENGTHS / (2.0 * self.prior)))
        ended = self._shared[None, None].weights + max(MIN_SEEN - self.num_observed, 0.0) * prior
        weight = max(1.0 - self.num_observed / NUM_KNOWN, 0.0)
        bins = np.searchsorted(_LENGTHS[1:-1], running, side="right")
        seen = ended + weight * np.bincount(bins, minlength=_NUM_BINS)
        at_risk = seen[::-1].cumsum()[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros(_NUM_BINS), where=at_risk > 0.0)
        return _LENGTHS, np.append(1.0, np.cumprod(1.0 - hazard))

    def observe(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int, predicted: float) -> None:
        for bucket in (num_prompt_tokens.bit_length(), None):
            cell = self._cells.pop((tenant, bucket), None) or LengthHistogram()
            if len(self._cells) >= self._max_cells:
                self._cells.popitem(last=False)
            self._cells[tenant, bucket] = cell
            for histogram in (cell, self._shared.setdefault((None, bucket), LengthHistogram())):
                histogram.add(num_output_tokens)
        self.num_observed += 1
        smoothing = max(_ERROR_SMOOTHING, 1.0 / self.num_observed)
        self.mean_abs_error += smoothing * (abs(predicted - num_output_tokens) - self.mean_abs_error)
