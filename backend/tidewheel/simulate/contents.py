"""Token contents of requests: views of one pool of random ids, so prompts take no memory.

A request reads prompt and output from one offset; so do all turns of a session, whose prompts thus grow. Requests of
a prefix group begin with the same view.
"""

from __future__ import annotations

import numpy as np

from tidewheel.workload.lengths import Int32Array
from tidewheel.workload.traces import NOBODY, Trace

STOP_TOKEN = 0
_POOL_SIZE = 1 << 22
_STRIDE = 0x9E3779B1  # odd, so its first `_POOL_SIZE` multiples differ


class Contents:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        rng = np.random.default_rng(0)
        pool = rng.integers(1, 2**31 - 1, _POOL_SIZE, dtype=np.int32)
        self.pool: Int32Array = np.concatenate((pool, pool[: trace.max_num_tokens + 1]))

    def offset(self, index: int) -> int:
        """Return the request's offset: its token at position p is ``pool[offset + p]``."""
        session = int(self._trace.sessions[index])
        return self._offset(2 * session + 1 if session != NOBODY else 2 * index)

    def prompt(self, index: int) -> Int32Array:
        trace = self._trace
        offset, end = self.offset(index), int(trace.prompt_tokens[index])
        own = self.pool[offset : offset + end]
        num_shared = int(trace.prefix_tokens[index])
        if not num_shared:
            return own
        shared = self._offset(-2 * int(trace.prefix_groups[index]) - 2)
        return np.concatenate((self.pool[shared : shared + num_shared], own[num_shared:]))

    @staticmethod
    def _offset(number: int) -> int:
        return number * _STRIDE % _POOL_SIZE
