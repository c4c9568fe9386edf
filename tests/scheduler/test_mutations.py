"""Would the state machine notice? Deliberate bugs, put in one at a time, must each make it fail.

* *blocks freed at once*: blocks of a request that leaves while a batch in flight names it go back to the pool, and
  the next batch writes them under the running one.
* *hash before commit*: the blocks of a prompt can be found when it enters, before their content is computed.
* *hit too long*: a hit may cover the whole request, so that no token is left to compute.
* *tokens in flight forgotten*: with two batches in flight, the second one computes the positions of the first again.
* *wrong victim*: the request that is served first loses its blocks.
* *salt forgotten*: requests under different salts share blocks.
* *stale answer taken*: a request that takes over a row gets the token that was in flight for the one before.
* *class forgotten*: requests enter in the order of arrival, whatever their class.
* *budget overdrawn*: every chunk is as long as its prompt.
* *rows not announced*: the runner is not told which rows are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.scheduler_machine import SchedulerMachine
from tidewheel.errors import InternalError
from tidewheel.kvcache import manager, prefix
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.scheduler import reserve
from tidewheel.scheduler import scheduler as scheduler_module
from tidewheel.scheduler.columns import Columns
from tidewheel.scheduler.plan import Chunk, StepPlan
from tidewheel.scheduler.policy import fifo
from tidewheel.scheduler.state import State

# No shrinking: that it fails is all that is asked.
SETTINGS = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
)


def free_at_once(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.free
    patch.setattr(KVCacheManager, "free", lambda self, row, *, after_step=None: real(self, row))


def hash_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = State.enter

    def enter(self: State, request: Any, hit: Any, *, keep_free: int) -> list[int] | None:
        blocks = real(self, request, hit, keep_free=keep_free)
        if blocks is not None:
            self.kv.commit(request.row, request, request.num_tokens)
        return blocks

    patch.setattr(State, "enter", enter)


def hit_too_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager, "max_hit_blocks", lambda num_tokens, block_size: num_tokens // block_size)


def tokens_in_flight_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Columns.gaps

    def gaps(self: Columns) -> Any:
        kept, self.num_inflight_tokens = self.num_inflight_tokens, np.zeros_like(self.num_inflight_tokens)
        found = real(self)
        self.num_inflight_tokens = kept
        return found

    patch.setattr(Columns, "gaps", gaps)


def wrong_victim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reserve, "choose_victim", lambda ranks: min(ranks, key=ranks.__getitem__))


def salt_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = prefix.root_hash
    patch.setattr(prefix, "root_hash", lambda tenant, salt: real("", ""))


def stale_answer_taken(patch: pytest.MonkeyPatch) -> None:
    real = Columns.leave

    def leave(self: Columns, row: int) -> Any:
        rank = real(self, row)
        self.epochs[row] -= 1
        return rank

    patch.setattr(Columns, "leave", leave)


def class_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler_module, "POLICIES", {"priority": fifo, "fifo": fifo})


def budget_overdrawn(patch: pytest.MonkeyPatch) -> None:
    def add_chunk(self: StepPlan, row: int, start: int, end: int) -> None:
        self._chunks.append(Chunk(row, start, end - start, True))
        self.token_budget -= end - start

    patch.setattr(StepPlan, "add_chunk", add_chunk)


def rows_not_announced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Columns, "take_left_rows", lambda self: np.empty(0, dtype=np.int32))


MUTATIONS = (
    free_at_once, hash_before_commit, hit_too_long, tokens_in_flight_forgotten, wrong_victim, salt_forgotten,
    stale_answer_taken, class_forgotten, budget_overdrawn, rows_not_announced,
)  # fmt: skip


def test_without_a_bug_it_is_content() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(SETTINGS, max_examples=20))


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_state_machine_notices(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InternalError, AttributeError, IndexError, KeyError, TypeError)):
        run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
