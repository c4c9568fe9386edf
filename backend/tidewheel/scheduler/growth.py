"""Expected growth of running requests, by which others enter."""

from __future__ import annotations

import numpy as np

from tidewheel.batch import Float64Array
from tidewheel.kvcache.prefix import PrefixHit
from tidewheel.request import Request
from tidewheel.scheduler.state import SchedulerState

AHEAD: Float64Array = 4.0 * 2.0 ** np.arange(16)  # steps from now: 4 to 131,072
CAUTION = 2.0  # standard deviations that must be free beside the mean


class GrowthForecast:
    """Need for cache slots t steps from now: a request has grown by t, or ended and given back its own slots.

    With p(t) the chance to be alive, from `OutputPredictor.survival`, and o its own slots, it adds

        mean        p · (t + o) - o
        variance    p · (1 - p) · (t + o)²

    Past-Future scheduling (Gong et al., ASPLOS 2025) admits by the peak of predicted memory, too.
    """

    def __init__(self, state: SchedulerState) -> None:
        columns = state.columns
        rows = columns.running.nonzero()[0]
        self._state = state
        self._rows = rows
        self._num_most = int((columns.max_num_tokens[rows] - columns.num_slots[rows]).clip(0).sum())
        self._newcomers: list[tuple[int, int, int]] = []  # output tokens, tokens left, own slots
        self._curve: tuple[Float64Array, Float64Array] | None = None
        self._of_rows = np.zeros((2, len(AHEAD)))

    def num_missing_slots(self, request: Request, hit: PrefixHit, *, keep_free: int) -> float:
        """Return the slots that lack, or 0 and count the request. Longest outputs that fit need no estimate."""
        kv = self._state.kv
        num_free = -kv.block_size * kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
        left = request.max_tokens - request.num_output_tokens
        own = kv.block_size * (kv.num_blocks_for(request.num_tokens) - len(hit.block_ids))
        newcomers = [*self._newcomers, (request.num_output_tokens, left, own)]
        if self._num_most + left > num_free and (num_missing := self._need(newcomers) - num_free) > 0.0:
            return num_missing
        self._num_most += left
        self._newcomers = newcomers
        return 0.0

    def _need(self, newcomers: list[tuple[int, int, int]]) -> float:
        columns, rows = self._state.columns, self._rows
        if self._curve is None:
            outputs = (columns.num_tokens[rows] - columns.num_prompt_tokens[rows]).astype(np.float64)
            lefts = (columns.max_num_tokens[rows] - columns.num_tokens[rows]).astype(np.float64)
            self._curve = self._state.predictor.survival(outputs)
            self._of_rows = _moments(self._curve, outputs, lefts, columns.num_own_slots(rows))
        mean, variance = self._of_rows + _moments(self._curve, *np.array(newcomers, dtype=np.float64).T)
        return float((mean + CAUTION * np.sqrt(variance)).max())


def _moments(
    curve: tuple[Float64Array, Float64Array], outputs: Float64Array, lefts: Float64Array, own: Float64Array
) -> Float64Array:
    """Return mean and variance, [2, len(AHEAD)]."""
    now = np.interp(outputs, *curve).clip(1e-9)[:, None]
    alive = np.interp(outputs[:, None] + AHEAD, *curve) / now
    alive *= lefts[:, None] > AHEAD
    held = AHEAD + own[:, None]
    mean = (alive * held - own[:, None]).sum(axis=0)
    return np.stack((mean, (alive * (1.0 - alive) * held * held).sum(axis=0)))
