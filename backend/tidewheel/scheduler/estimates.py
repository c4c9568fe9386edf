import math
from bisect import bisect_left
from collections import OrderedDict
from itertools import product

import numpy as np
import numpy.typing as npt

QUANTILE = 0.5  # least mean absolute error
MAX_CELLS = 2048
MIN_SEEN = 8.0
NUM_KNOWN = 200  # outputs after which running requests are ignored

_FORGET = 0.99  # per output
_BINS_PER_OCTAVE = 4
_NUM_BINS = 21 * _BINS_PER_OCTAVE
_ERROR_SMOOTHING = 0.01

_EDGES: list[float] = [2.0 ** (index / _BINS_PER_OCTAVE) for index in range(_NUM_BINS + 1)]
_LENGTHS = np.array(_EDGES)

_Cell = tuple[str | None, int | None]  # tenant and prompt bucket; None: all
_Floats = npt.NDArray[np.float64]


class LengthHistogram:
    """Output lengths in quarter octaves. Each weighs `_FORGET` times as much as the next."""

    __slots__ = ("num_seen", "weights")

    def __init__(self) -> None:
        self.weights = np.zeros(_NUM_BINS)
        self.num_seen = 0.0  # sum of the weights, at most 1 / (1 - `_FORGET`)

    def add(self, length: int) -> None:
        self.weights *= _FORGET
        self.weights[bisect_left(_EDGES, length + 0.5, 1, _NUM_BINS) - 1] += 1.0
        self.num_seen = _FORGET * self.num_seen + 1.0

    def quantile(self, fraction: float) -> float:
        sums: list[float] = self.weights.cumsum().tolist()
        wanted = fraction * sums[-1]
        index = bisect_left(sums, wanted)
        weight = float(self.weights[index])
        inside = (wanted - (sums[index] - weight)) / weight
        return _EDGES[index] + inside * (_EDGES[index + 1] - _EDGES[index])


class OutputPredictor:
    """Median output length by tenant and prompt length, in an LRU of `MAX_CELLS`."""

    def __init__(self, prior_tokens: int) -> None:
        self.prior = float(prior_tokens)
        self._cells: OrderedDict[_Cell, LengthHistogram] = OrderedDict({(None, None): LengthHistogram()})
        self.num_observed = 0
        self.mean_abs_error = 0.0  # tokens, over about 100 outputs

    def predict(self, tenant: str, num_prompt_tokens: int, max_tokens: int) -> float:
        """Return the expected number of output tokens, in [1, `max_tokens`]."""
        bucket = num_prompt_tokens.bit_length()
        for key in product((tenant, None), (bucket, None)):
            histogram = self._cells.get(key)
            if histogram is not None and histogram.num_seen >= MIN_SEEN:
                return min(histogram.quantile(QUANTILE), float(max_tokens))
        return min(self.prior, float(max_tokens))

    def survival(self, running: _Floats) -> tuple[_Floats, _Floats]:
        """Return ascending output lengths and the fraction of outputs longer than each (Kaplan-Meier estimate, 1958).

        `running`: output lengths so far, which count as lower bounds, with a weight that falls to 0 when `NUM_KNOWN`
        requests have ended. Until `MIN_SEEN` have ended, a geometric prior fills in.
        """
        prior = np.diff(1.0 - np.exp(-_LENGTHS / (2.0 * self.prior)))
        ended = self._cells[None, None].weights + max(MIN_SEEN - self.num_observed, 0.0) * prior
        weight = max(1.0 - self.num_observed / NUM_KNOWN, 0.0)
        bins = np.searchsorted(_LENGTHS[1:-1], running, side="right")
        seen = ended + weight * np.bincount(bins, minlength=_NUM_BINS)
        at_risk = seen[::-1].cumsum()[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros(_NUM_BINS), where=at_risk > 0.0)
        return _LENGTHS, np.append(1.0, np.cumprod(1.0 - hazard))

    def observe(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int, predicted: float) -> None:
        for key in product((None, tenant), (None, num_prompt_tokens.bit_length())):
            histogram = self._cells.setdefault(key, LengthHistogram())
            self._cells.move_to_end(key)
            histogram.add(num_output_tokens)
        while len(self._cells) > MAX_CELLS:
            self._cells.popitem(last=False)
        self.num_observed += 1
        smoothing = max(_ERROR_SMOOTHING, 1.0 / self.num_observed)
        self.mean_abs_error += smoothing * (abs(predicted - num_output_tokens) - self.mean_abs_error)


_STEP_FORGET = 0.98  # per step
_MIN_STEPS = 8
_TIME_CONSTANT_S = 10.0  # of evidence
_MIN_BACKLOG_S = 0.5  # before a pace counts
_MAX_FACTOR = 2.0  # of the expected time, for pauses
_CAUTION = 2.0  # standard deviations beside the mean


def _fade(now: float, last: float) -> float:
    return math.exp(-max(now - last, 0.0) / _TIME_CONSTANT_S)


class StepTime:
    """Estimate of a step's seconds by tokens: ``seconds ≈ overhead + seconds_per_token · chunk tokens``.

    Least squares with exponential forgetting (West, "Updating mean and variance estimates", CACM 1979).
    """

    def __init__(self) -> None:
        self.steps_per_token = 1.0  # of a decoding row: fewer with drafts
        self._num_steps = 0
        self._last = 0.0  # end of the last step
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._var = 0.0
        self._cov = 0.0
        self._var_seconds = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Slope of the estimate; 0 until steps' sizes differ enough."""
        is_known = self._num_steps >= _MIN_STEPS and self._var > self._weight
        return max(self._cov / self._var, 0.0) if is_known else 0.0

    def is_fresh(self, now: float) -> bool:
        return self._weight * _fade(now, self._last) >= _MIN_STEPS

    def observe(self, num_chunk_tokens: int, seconds: float, now: float, steps_per_token: float = 1.0) -> None:
        expected = self.seconds(num_chunk_tokens)
        if self._num_steps >= _MIN_STEPS and expected > 0.0:
            seconds = min(seconds, _MAX_FACTOR * expected)
        self._num_steps += 1
        forget = _STEP_FORGET * _fade(now - seconds, self._last)  # idle time counts
        self._last = now
        self._weight = self._weight * forget + 1.0
        tokens_off = num_chunk_tokens - self._mean_tokens
        seconds_off = seconds - self._mean_seconds
        gain = 1.0 / self._weight
        self.steps_per_token += gain * (steps_per_token - self.steps_per_token)
        self._mean_tokens += tokens_off * gain
        self._mean_seconds += seconds_off * gain
        rest = 1.0 - gain
        self._var = self._var * forget + tokens_off * tokens_off * rest
        self._cov = self._cov * forget + tokens_off * seconds_off * rest
        self._var_seconds = self._var_seconds * forget + seconds_off * seconds_off * rest

    def seconds(self, num_chunk_tokens: int) -> float:
        """Predict a step's seconds: the mean without a slope, 0 before any step."""
        return max(self._mean_seconds + self.seconds_per_token * (num_chunk_tokens - self._mean_tokens), 0.0)

    def longest_seconds(self, num_chunk_tokens: int) -> float | None:
        """Bound a step's seconds: in proportion to tokens without a slope. None before any step."""
        if not self._num_steps:
            return None
        if self.seconds_per_token > 0.0:
            return self.seconds(num_chunk_tokens)
        return self._mean_seconds * max(num_chunk_tokens / max(self._mean_tokens, 1.0), 1.0)

    def most_tokens(self, seconds: float, caution: float = _CAUTION) -> int:
        """Return the tokens of a step that seldom exceeds so many seconds: in proportion without a slope, or 1."""
        if not self._num_steps:
            return 1
        slope = self.seconds_per_token or max(self._mean_seconds, 1e-9) / max(self._mean_tokens, 1.0)
        squares = self._var_seconds - slope * (2.0 * self._cov - slope * self._var)  # of what the estimate misses
        spread = math.sqrt(max(squares, 0.0) / self._weight)
        most = max(seconds - caution * spread, 0.5 * seconds)
        return int(self._mean_tokens + (most - self._mean_seconds) / slope)


class ServiceEstimate:
    """Estimates of queue and prefill seconds, from step times and starts while others wait; 0 without recent data."""

    def __init__(self, step_time: StepTime, max_num_batched_tokens: int) -> None:
        self._step_time = step_time
        self.step_tokens = max_num_batched_tokens  # that the next steps may compute of prompts
        self._last: float | None = None  # end of the last step, under backlog
        self._seen_at = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def observe_step(self, now: float, num_started_tokens: int, num_waiting: int) -> None:
        elapsed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now if num_waiting else None
        if elapsed > 0.0:
            fade = _fade(now, self._seen_at)
            self._tokens = self._tokens * fade + num_started_tokens
            self._seconds = self._seconds * fade + elapsed
            self._seen_at = now

    def queue_seconds(self, num_tokens_ahead: int, now: float, *, has_free_rows: bool) -> float:
        """Return the time until all tokens ahead have started: with free rows, at most their prefill."""
        is_known = self._seconds * _fade(now, self._seen_at) >= _MIN_BACKLOG_S and self._tokens > 0.0
        seconds = num_tokens_ahead / (self._tokens / self._seconds) if is_known else 0.0
        if has_free_rows and self._step_time.is_fresh(now):
            seconds = min(seconds, self.prefill_seconds(num_tokens_ahead, now))
        return seconds

    def prefill_seconds(self, num_tokens: int, now: float) -> float:
        if not self._step_time.is_fresh(now):
            return 0.0
        whole, rest = divmod(num_tokens, self.step_tokens)
        seconds = whole * self._step_time.seconds(self.step_tokens)
        return seconds + self._step_time.seconds(rest) if rest else seconds
