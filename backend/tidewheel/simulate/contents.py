"""The tokens of simulated requests: views of one pool of random ids, so that a million prompts cost no memory.

A request reads the pool from an offset of its own, prompt and output alike, so what it generates is determined by
its place. The turns of a session read from one offset: the prompt of a later turn begins with all that was said
before. Requests of a prefix group begin with the same view.
"""

from __future__ import annotations

import numpy as np

from tidewheel.simulate.lengths import Int32Array
from tidewheel.simulate.traces import NOBODY, Trace

STOP_TOKEN = 0
_POOL_SIZE = 1 << 22
_STRIDE = 0x9E3779B1  # odd, so the first `_POOL_SIZE` multiples of it are all different


class Contents:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        rng = np.random.default_rng(0)
        pool = rng.integers(1, 2**31 - 1, _POOL_SIZE, dtype=np.int32)
        self.pool: Int32Array = np.concatenate((pool, pool[: trace.max_num_tokens + 1]))

    def offset(self, index: int) -> int:
        """Where in the pool the request reads; its token at position p is ``pool[offset + p]``."""
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
