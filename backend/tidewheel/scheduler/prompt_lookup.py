from __future__ import annotations

import numpy as np

from tidewheel.batch import Int32Array, RowArray
from tidewheel.scheduler.speculation import Proposals


class PromptLookup:
    is_free = True

    def __init__(self, num_rows: int, max_model_len: int, most: int) -> None:  # noqa: ARG002
        self._most = most
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._tokens[row] = token_ids.tolist()

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self._tokens[row].append(token)

    def propose(self, rows: RowArray) -> Proposals:
        counts, ids = np.zeros(len(rows), np.int32), np.zeros((len(rows), self._most), np.int32)
        for index, row in enumerate(rows.tolist()):
            tokens = self._tokens[row]
            for start in range(len(tokens) - 3, -1, -1):
                if tokens[start : start + 2] == tokens[-2:]:
                    found = tokens[start + 2 : start + 2 + self._most]
                    counts[index], ids[index, : len(found)] = len(found), found
                    break
        return Proposals(counts, ids, np.zeros(len(rows), np.int32))
