"""KVCacheManager against a naive model: what each block holds, who names it, and what must be found.

The model keeps no order and no hashes. It knows the content of a block (salt and tokens up to its end) from the
commit on until the block is taken by another row, and asks of every hit that it is right, block aligned, short of the
request, and as long as it could be.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.scheduling import make_request
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request

Content = tuple[str, tuple[int, ...]]

MAX_ROWS = 6


@dataclass
class NaiveRow:
    request: Request
    table: list[int]
    num_computed_tokens: int


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 32), block_size=st.sampled_from([1, 2, 4, 16]), base=st.lists(st.integers(0, 3))
    )
    def start(self, num_blocks: int, block_size: int, base: list[int]) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)
        self.base = base * 4
        self.rows: dict[int, NaiveRow] = {}
        self.held: dict[int, list[list[int]]] = {}
        self.contents: dict[int, Content] = {}  # of committed blocks
        self.num_requests = 0
        self.newest_step = 0

    # --- the model --------------------------------------------------------------------------------------------

    def content(self, request: Request, num_tokens: int) -> Content:
        tokens = (*request.prompt_token_ids.tolist(), *request.output_token_ids)
        return request.cache_salt, tokens[:num_tokens]

    def holders(self, block_id: int) -> int:
        tables = [row.table for row in self.rows.values()] + [
            table for tables in self.held.values() for table in tables
        ]
        return sum(block_id in table for table in tables)

    def num_free(self) -> int:
        return sum(self.holders(block_id) == 0 for block_id in range(self.kv.num_blocks))

    def naive_hit(self, request: Request) -> int:
        """Tokens that could be found."""
        size, known = self.kv.block_size, set(self.contents.values())
        num_blocks = 0
        while (num_blocks + 1) * size < request.num_tokens:
            if self.content(request, (num_blocks + 1) * size) not in known:
                break
            num_blocks += 1
        return num_blocks * size

    # --- rules ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        salt=st.sampled_from(" x"),
    )
    def allocate(self, shared: int, own: list[int], salt: str) -> None:
        request = make_request(f"r{self.num_requests}", [*self.base[:shared], *own], cache_salt=salt.strip())
        self.num_requests += 1
        size = self.kv.block_size
        hit = self.kv.find_prefix(request)
        assert hit.num_tokens == self.naive_hit(request) == len(hit.block_ids) * size
        assert hit.num_tokens <= request.num_tokens - 1
        for index, block_id in enumerate(hit.block_ids):
            assert self.contents[block_id] == self.content(request, (index + 1) * size)
        num_new = -(-request.num_tokens // size) - len(hit.block_ids)
        revived = sum(self.holders(block_id) == 0 for block_id in hit.block_ids)
        row = min(set(range(MAX_ROWS)) - self.rows.keys())
        fits = num_new + revived <= self.num_free()
        assert self.kv.allocate(row, request.num_tokens, hit) == fits
        if fits:
            table = list(self.kv.block_table(row))
            assert table[: len(hit.block_ids)] == list(hit.block_ids)
            self.take(table[len(hit.block_ids) :])
            self.rows[row] = NaiveRow(request, table, hit.num_tokens)

    def take(self, block_ids: list[int]) -> None:
        """These blocks are new to their row: nobody may hold them, and what was in them is gone."""
        for block_id in block_ids:
            assert self.holders(block_id) == 0
            self.contents.pop(block_id, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1))
        new_blocks = self.kv.grow(rows)
        assert (new_blocks is not None) == (len(rows) <= self.num_free())
        if new_blocks is not None:
            self.take(new_blocks)
            for row, block_id in zip(rows, new_blocks, strict=True):
                self.rows[row].table.append(block_id)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), output=st.lists(st.integers(0, 3), max_size=4))
    def compute_and_commit(self, data: st.DataObject, output: list[int]) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        state = self.rows[row]
        size = self.kv.block_size
        room = len(state.table) * size - state.request.num_tokens
        state.request.output_token_ids.extend(output[: max(room, 0)])
        end = data.draw(st.integers(state.num_computed_tokens, state.request.num_tokens))
        first = state.num_computed_tokens // size
        state.num_computed_tokens = end
        self.kv.commit(row, state.request, end)
        for index in range(first, end // size):
            content = self.content(state.request, (index + 1) * size)
            if content not in self.contents.values():
                self.contents[state.table[index]] = content

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), in_flight=st.booleans())
    def free(self, data: st.DataObject, in_flight: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        table = self.rows.pop(row).table
        if in_flight:
            self.newest_step += 1
            self.held[self.newest_step] = [table]
        self.kv.free(row, after_step=self.newest_step if in_flight else None)

    @precondition(lambda self: self.held)
    @rule()
    def step_done(self) -> None:
        step_id = min(self.held)
        del self.held[step_id]
        self.kv.step_done(step_id)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.kv.forget(row)
        for block_id in self.rows[row].table:
            self.contents.pop(block_id, None)
        self.kv.free(row)
        del self.rows[row]

    # --- invariants -------------------------------------------------------------------------------------------

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        assert self.kv.num_free_blocks == self.num_free()
        assert self.kv.num_cached_blocks == sum(self.holders(block_id) == 0 for block_id in self.contents)
        held = {block_id for tables in self.held.values() for table in tables for block_id in table}
        running = {block_id for row in self.rows.values() for block_id in row.table}
        assert self.kv.num_held_blocks == len(held - running)
        for row, state in self.rows.items():
            assert list(self.kv.block_table(row)) == state.table

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for row in list(self.rows):
            self.kv.free(row)
        self.kv.all_steps_done()
        self.kv.check_invariants()
        assert self.kv.num_free_blocks == self.kv.num_blocks


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.slow
class TestManagerMachineLong(ManagerMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=60, deadline=None)
