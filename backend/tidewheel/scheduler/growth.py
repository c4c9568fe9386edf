from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidewheel.kvcache.hits import PrefixHit
from tidewheel.request import Request
from tidewheel.scheduler.state import State

FloatArray = npt.NDArray[np.float64]

AHEAD: FloatArray = 4.0 * 2.0 ** np.arange(16)  # steps ahead: 4 to 131,072
CAUTION = 2.0  # standard deviations above the mean need


class Growth:
    """Future need for cache slots: mean and variance over possible output lengths.

    In t steps, a live request grows by t tokens and an ended one frees its own slots. With survival p(t), from
    `OutputPredictor.survival`, and o own slots, each request adds

        mean        p · (t + o) - o
        variance    p · (1 - p) · (t + o)²

    Past-Future scheduling (Gong et al., ASPLOS 2025) also admits by peak predicted memory.
    """

    def __init__(self, state: State) -> None:
        columns = state.columns
        rows = columns.running.nonzero()[0]
        outputs = (columns.num_tokens[rows] - columns.num_prompt_tokens[rows]).astype(np.float64)
        self._state = state
        self._lengths, self._survival = state.predictor.survival(outputs)
        self.num_most = int((columns.max_num_tokens[rows] - columns.num_slots[rows]).clip(0).sum())
        self._mean = self._variance = np.zeros(len(AHEAD))
        self._add(outputs, columns.max_num_tokens[rows] - columns.num_tokens[rows], columns.num_own_slots(rows))

    def leaves_room(self, request: Request, hit: PrefixHit, *, keep_free: int) -> bool:
        """Return whether the request may enter, and add its need if so. Followers ask separately."""
        kv = self._state.kv
        num_free = -kv.block_size * kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
        left = request.max_tokens - request.num_output_tokens
        own = kv.block_size * (kv.num_blocks_for(request.num_tokens) - len(hit.block_ids))
        before = (self.num_most, self._mean, self._variance)
        self.num_most += left
        self._add(np.array([float(request.num_output_tokens)]), np.array([left]), np.array([float(own)]))
        need = float((self._mean + CAUTION * np.sqrt(self._variance)).max())
        if min(need, self.num_most) <= num_free:
            return True
        self.num_most, self._mean, self._variance = before
        return False

    def _add(self, outputs: FloatArray, lefts: npt.NDArray[np.int_], own: FloatArray) -> None:
        """Add requests by output length, most tokens left and own slots."""
        now = np.interp(outputs, self._lengths, self._survival).clip(1e-9)[:, None]
        alive = np.interp(outputs[:, None] + AHEAD, self._lengths, self._survival) / now
        alive *= lefts[:, None] > AHEAD
        held = AHEAD + own[:, None]
        self._mean = self._mean + (alive * held - own[:, None]).sum(axis=0)
        self._variance = self._variance + (alive * (1.0 - alive) * held * held).sum(axis=0)
