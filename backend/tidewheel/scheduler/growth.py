"""Whether a newcomer leaves running requests the blocks that they are expected to grow into."""

from __future__ import annotations

import numpy as np

from tidewheel.kvcache.hits import PrefixHit
from tidewheel.request import Request
from tidewheel.scheduler.columns import RowArray
from tidewheel.scheduler.state import State


def has_room_to_grow(state: State, request: Request, hit: PrefixHit, *, keep_free: int) -> bool:
    """Whether blocks are expected to last until all running requests and this one have ended.

    Each row grows by a token a step until its expected end and gives its own blocks back then. With rows in the order
    of their ends, the last first, what is needed when row j ends is

        Σ growth of rows 0 … j  -  Σ own blocks of the rows behind j

    and the largest of these must be free. After the idea of Past-Future scheduling (Gong et al., ASPLOS 2025) to
    admit by the peak of predicted memory. Partly filled blocks are left out: as much is free in them, on average, as
    is lost at the ends.
    """
    kv, columns = state.kv, state.columns
    rows = columns.running.nonzero()[0]
    if not len(rows):
        return True
    num_free = -kv.block_size * kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
    lefts = np.append(_tokens_left(state, rows), np.full(1 + len(request.followers), _left_of(state, request)))
    num_mine = kv.num_blocks_for(request.num_tokens) - len(hit.block_ids)
    owned = columns.num_slots[rows] - columns.num_shared_slots[rows]
    own = np.append(owned, [num_mine * kv.block_size, *[0] * len(request.followers)])
    if int(lefts.sum()) <= num_free:
        return True
    order = np.argsort(-lefts)
    lefts, own = lefts[order], own[order]
    growth = np.arange(1, len(lefts) + 1) * lefts
    given_back = own.sum() - np.cumsum(own)
    return bool((growth - given_back).max() <= num_free)


def _left_of(state: State, request: Request) -> int:
    return state.expect_tokens(request) - request.num_tokens - 1


def _tokens_left(state: State, rows: RowArray) -> RowArray:
    """Return the tokens that each row is expected to keep in the cache beside those that it has.

    The last token is never fed back, so it needs no slot. A row that outlived its prediction gets a new one.
    """
    columns = state.columns
    for row in rows[columns.num_tokens[rows] >= columns.expected_num_tokens[rows]].tolist():
        request = columns.write_back(row)
        columns.expected_num_tokens[row] = state.expect_tokens(request)
    lefts: RowArray = columns.expected_num_tokens[rows].astype(np.intp) - columns.num_tokens[rows] - 1
    return lefts
