from collections.abc import Callable

import numpy as np

from tidewheel.batch import Int32Array, Int64Array, RowArray
from tidewheel.scheduler.speculation import Proposals, Proposer


class SimulatedDrafts(Proposer):
    """Proposer of each row's next tokens. A draft is right with the chance `acceptance`, if those before it are."""

    def __init__(
        self,
        num_rows: int,
        most: int,
        acceptance: float,
        tokens_at: Callable[[RowArray, Int64Array], Int32Array],
        *,
        is_free: bool,
        seed: int,
    ) -> None:
        """Take what the model will sample from `tokens_at`: tokens by row and position, of equal shapes."""
        self.is_free = is_free
        self._counts = np.zeros(num_rows, dtype=np.int64)  # known tokens
        self._depths = np.arange(most)
        self._acceptance = acceptance
        self._tokens_at = tokens_at
        self._random = np.random.default_rng(seed)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._counts[row] = len(token_ids)

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:  # noqa: ARG002
        self._counts += np.bincount(rows, minlength=len(self._counts))

    def propose(self, rows: RowArray) -> Proposals:
        positions = self._counts.take(rows)[:, None] + self._depths
        tokens = self._tokens_at(np.broadcast_to(rows[:, None], positions.shape), positions)
        tokens ^= self._random.random(positions.shape) >= self._acceptance  # another token
        counts = np.full(len(rows), len(self._depths), dtype=np.int32)
        return Proposals(counts, tokens, np.zeros(len(rows), dtype=np.int32))
