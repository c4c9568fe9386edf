"""How long an output will be, learned from the ones that have ended."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

import numpy as np
import numpy.typing as npt

QUANTILE = 0.5  # the median: of all numbers, the one with the least mean absolute error
MAX_CELLS = 2048
MIN_SEEN = 8.0  # outputs in a cell before it is believed
NUM_KNOWN = 200  # outputs after which those that still run tell nothing new

_FORGET = 0.99  # weight that an output keeps at the next one of its cell: about the last 100 count
_BINS_PER_OCTAVE = 4
_NUM_BINS = 21 * _BINS_PER_OCTAVE  # outputs up to 2^21 tokens
_MAX_SCALE = 1e12  # weights of a cell are made small again above it
_ERROR_SMOOTHING = 0.01

_EDGES: list[float] = [
    2.0 ** (index / _BINS_PER_OCTAVE) for index in range(_NUM_BINS + 1)
]  # bin i covers [edge i, edge i + 1)
_LENGTHS = np.array(_EDGES)

_Cell = tuple[str | None, int | None]  # tenant and prompt bucket; None: all of them


class Histogram:
    """Output lengths in bins a quarter of an octave wide, where older ones count less and less.

    Forgetting costs nothing: instead of fading all bins, a newcomer weighs 1 / `_FORGET` times the one before it.
    """

    __slots__ = ("_scale", "_total", "_weights")

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * _NUM_BINS))
        self._scale = 1.0  # weight of the next output
        self._total = 0.0

    @property
    def num_seen(self) -> float:
        """Faded count: at most 1 / (1 - `_FORGET`)."""
        return self._total / self._scale

    def add(self, length: int) -> None:
        if self._scale > _MAX_SCALE:
            self._weights = array("d", [weight / self._scale for weight in self._weights])
            self._total /= self._scale
            self._scale = 1.0
        self._scale /= _FORGET
        self._weights[_bin_of(length)] += self._scale
        self._total += self._scale

    def quantile(self, fraction: float) -> float:
        """Length that a `fraction`, above 0, of the outputs does not exceed; lengths in a bin are taken as even."""
        sums = list(accumulate(self._weights))
        wanted = fraction * sums[-1]
        index = bisect_left(sums, wanted)
        weight = self._weights[index]
        inside = (wanted - (sums[index] - weight)) / weight
        return _EDGES[index] + inside * (_EDGES[index + 1] - _EDGES[index])

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """Outputs in each bin, older ones faded."""
        return np.array(self._weights) / self._scale


class OutputPredictor:
    """Predicts the median output length of requests like this one.

    Alike are requests of one tenant whose prompts are of one length up to a factor of two. A cell that has seen
    fewer than `MIN_SEEN` outputs is not asked; then all prompts of the tenant are, then all tenants with that prompt
    length, then everybody, and at last the prior. The answer is never above `max_tokens`. Outputs that were cut
    count with the length they had.

    Memory is bounded whatever tenants clients name: `MAX_CELLS` cells of 84 bins, least recently used ones go.
    """

    def __init__(self, prior_tokens: int) -> None:
        self._prior = float(prior_tokens)
        self._cells: OrderedDict[_Cell, Histogram] = OrderedDict()  # of tenants; least recently used first
        self._shared: dict[_Cell, Histogram] = {}  # of all tenants; one for each bucket
        self.num_observed = 0
        self.mean_abs_error = 0.0  # tokens between predicted and real length, smoothed over about 100 outputs

    @property
    def num_cells(self) -> int:
        return len(self._cells) + len(self._shared)

    def predict(self, tenant: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Output tokens, 1 to `max_tokens`."""
        return self.quantile(QUANTILE, tenant, num_prompt_tokens, max_tokens)

    def survival(self, running: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return output lengths, ascending, and the share of all outputs that is longer than each.

        The estimate of Kaplan and Meier (1958): those that still run, at lengths `running`, count as outputs at
        least so long. Else the first outputs to end, which are the short ones, would pass for all. The more have
        ended, the less the running ones add, and from `NUM_KNOWN` on nothing. The prior counts as `MIN_SEEN` outputs
        of a geometric length with twice its mean, until as many have ended.
        """
        histogram = self._shared.get((None, None))
        ended = np.zeros(_NUM_BINS) if histogram is None else histogram.weights
        prior = np.diff(1.0 - np.exp(-_LENGTHS / (2.0 * self._prior)))
        ended = ended + max(MIN_SEEN - self.num_observed, 0.0) * prior
        weight = max(1.0 - self.num_observed / NUM_KNOWN, 0.0)
        bins = np.searchsorted(_LENGTHS[1:-1], running, side="right")
        seen = ended + weight * np.bincount(bins, minlength=_NUM_BINS)
        at_risk = seen[::-1].cumsum()[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros(_NUM_BINS), where=at_risk > 0.0)
        return _LENGTHS, np.append(1.0, np.cumprod(1.0 - hazard))

    def quantile(self, fraction: float, tenant: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Length that a `fraction`, above 0, of outputs like this one does not exceed; 1 to `max_tokens`."""
        histogram = self._believed(tenant, num_prompt_tokens.bit_length())
        length = self._prior if histogram is None else histogram.quantile(fraction)
        return min(length, float(max_tokens))

    def observe(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int, predicted: float) -> None:
        """A request ended by itself after so many tokens, for which `predicted` had been said."""
        bucket = num_prompt_tokens.bit_length()
        for prompts in (bucket, None):
            self._tenant_cell((tenant, prompts)).add(num_output_tokens)
            self._shared.setdefault((None, prompts), Histogram()).add(num_output_tokens)
        self.num_observed += 1
        smoothing = max(_ERROR_SMOOTHING, 1.0 / self.num_observed)
        self.mean_abs_error += smoothing * (abs(predicted - num_output_tokens) - self.mean_abs_error)

    def _believed(self, tenant: str, bucket: int) -> Histogram | None:
        for cells, key in (
            (self._cells, (tenant, bucket)),
            (self._cells, (tenant, None)),
            (self._shared, (None, bucket)),
            (self._shared, (None, None)),
        ):
            histogram = cells.get(key)
            if histogram is not None and histogram.num_seen >= MIN_SEEN:
                return histogram
        return None

    def _tenant_cell(self, key: _Cell) -> Histogram:
        histogram = self._cells.get(key)
        if histogram is None:
            if len(self._cells) >= MAX_CELLS:
                self._cells.popitem(last=False)
            histogram = self._cells[key] = Histogram()
        self._cells.move_to_end(key)
        return histogram


def _bin_of(length: int) -> int:
    """Bin of a length of 1 or more; longer than the last edge falls into the last bin."""
    return min(max(bisect_left(_EDGES, length + 0.5) - 1, 0), _NUM_BINS - 1)
