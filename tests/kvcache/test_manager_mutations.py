"""Would the state machine of the KV manager notice? Deliberate bugs, put in one at a time, must each make it fail.

* *tail shared*: a row writes into the block of its session instead of a copy.
* *copy source not held*: the block that a tail is copied from is given away before the copy is made.
* *slot given away*: a host slot that is about to be read is evicted, and the batch writes it before it reads it.
* *tenant forgotten*: tenants share blocks.
* *written out too early*: blocks of a row that leaves are written out though nothing is in them yet.
* *fork too long*: a fork shares the block that its leader still writes.
* *session never released*: a session that ends keeps its blocks.
* *oldest session last*: under pressure the session used last gives way.
* *quota forgotten*: a session keeps whatever its request had.
* *wrong content kept*: what was found to be wrong stays in the host tier.
* *fetched blocks mixed up*: what comes back for a session goes into each other's blocks.
* *fetched blocks free*: blocks are given away while a session's content is on its way to them.
* *slots never released*: a session keeps the slots that it held before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.kvcache import invariants
from support.kvcache.kv_machine import KVMachine
from tidewheel.errors import InternalError
from tidewheel.kvcache import prefix
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.sessions import SessionStore
from tidewheel.kvcache.transfers import TransferQueue

# No shrinking: that it fails is all that is asked.
SETTINGS = settings(
    max_examples=1500,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
)


def tail_shared(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager._take_and_fill

    def take(self: KVCacheManager, row: int, num_new: int, hit: Any, slots: Any, num_left: int) -> list[int]:
        own = real(self, row, num_new, hit, slots, num_left)
        return [hit.tail_block, *own[1:]] if hit.tail_block >= 0 and not slots else own

    patch.setattr(KVCacheManager, "_take_and_fill", take)


def copy_source_not_held(patch: pytest.MonkeyPatch) -> None:
    real, fill = TransferQueue.take, KVCacheManager._take_and_fill

    def take_and_fill(self: KVCacheManager, row: int, *rest: Any, **more: Any) -> list[int]:
        own = fill(self, row, *rest, **more)
        if row in self.transfers.arrivals:
            self._pool.free(self.transfers.arrivals[row].copy_sources)
        return own

    def take(self: TransferQueue, step_id: int) -> Any:
        taken = real(self, step_id)
        if step_id in self._steps:
            self._steps[step_id].sources.clear()
        return taken

    patch.setattr(KVCacheManager, "_take_and_fill", take_and_fill)
    patch.setattr(TransferQueue, "take", take)
    patch.setattr(invariants, "held_sources", lambda transfers: [])


def slot_given_away(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.insert

    def insert(self: BlockPool, block_hash: bytes) -> int | None:
        slot = real(self, block_hash)
        if slot is None:
            for pinned in range(self.num_blocks):
                if self.hash_of(pinned) is not None:
                    self.drop(self.hash_of(pinned))
                    self.register_hashes([pinned], [block_hash])
                    self.touch([pinned])
                    return pinned
        return slot

    patch.setattr(BlockPool, "insert", insert)


def tenant_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = prefix.root_hash
    patch.setattr(prefix, "root_hash", lambda tenant, salt: real("", salt))


def written_out_too_early(patch: pytest.MonkeyPatch) -> None:
    def offload(self: KVCacheManager, row: int, request: Any, num_computed_tokens: int) -> int:
        num_full = request.num_tokens // self.block_size
        prefix.extend_block_hashes(request, num_full, self.block_size)
        self.transfers.swap_out(self._tables[row], request.block_hashes[:num_full])
        return 0

    patch.setattr(KVCacheManager, "offload", offload)


def fork_too_long(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.fork_hit

    def fork_hit(self: KVCacheManager, leader_row: int, request: Any) -> Any:
        hit = real(self, leader_row, request)
        if hit.tail_block < 0:
            return hit
        return hit._replace(block_ids=(*hit.block_ids, hit.tail_block), tail_block=-1)

    patch.setattr(KVCacheManager, "fork_hit", fork_hit)


def session_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", lambda self, block_ids: None)


def oldest_session_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionStore, "oldest_resident", lambda self: next(reversed(self._resident.values()), None))


def quota_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionStore, "most_blocks", lambda self, tenant, num_blocks: num_blocks)


def wrong_content_kept(patch: pytest.MonkeyPatch) -> None:
    def forget(self: KVCacheManager, row: int) -> None:
        for block_id in self._tables[row]:
            self._pool.drop(self._pool.hash_of(block_id))

    patch.setattr(KVCacheManager, "forget", forget)


def fetched_blocks_mixed_up(patch: pytest.MonkeyPatch) -> None:
    real = TransferQueue.fetch
    patch.setattr(TransferQueue, "fetch", lambda self, slots, blocks: real(self, slots[::-1], blocks))


def fetched_blocks_free(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: TransferQueue, slots: Any, blocks: Any) -> None:
        self._next.in_slots.extend(slots)
        self._pool.free(blocks)

    patch.setattr(TransferQueue, "fetch", fetch)


def slots_never_released(patch: pytest.MonkeyPatch) -> None:
    real = SessionStore._keep_in_host

    def keep(self: SessionStore, session: Any) -> None:
        session.host_slots = ()
        real(self, session)

    patch.setattr(SessionStore, "_keep_in_host", keep)


MUTATIONS = (
    tail_shared, copy_source_not_held, slot_given_away, tenant_forgotten, written_out_too_early, fork_too_long,
    session_never_released, oldest_session_last, quota_forgotten, wrong_content_kept, fetched_blocks_mixed_up,
    fetched_blocks_free, slots_never_released,
)  # fmt: skip


def test_without_a_bug_it_is_content() -> None:
    run_state_machine_as_test(KVMachine, settings=settings(SETTINGS, max_examples=20))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_state_machine_notices(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(
        (AssertionError, InternalError, AttributeError, IndexError, KeyError, TypeError, ExceptionGroup)
    ):
        run_state_machine_as_test(KVMachine, settings=SETTINGS)
