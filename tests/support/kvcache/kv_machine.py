"""Random life of a KV manager over a memory that really moves: every byte of content is checked against the tokens
that it must stand for. Used by the default run, the long run and the mutation tests.

The naive model is a list of slots for each block, of the pool and of the host tier. A slot holds tenant, salt and the
whole prefix that was computed into it. Batches are launched as the runner does it: out, in, copies, then the writes
of the rows; up to two are in flight. What a hit promised is read back from this memory when the row is computed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.kvcache import invariants
from support.kvcache.invariants import check_cache, free_blocks
from tidewheel.errors import NotFound
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.prefix import NO_HIT, PrefixHit
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams
from tidewheel.tenants import TenantLimits

MAX_ROWS = 6
TOOLS = ("read", "build", "test")
MAX_SESSIONS = 4
TENANTS = ("", "acme")
SALTS = ("", "", "x")
SESSIONS = ("", "one", "two", "three")
KINDS = (
    "turn", "turn", "enter", "enter", "resume", "resume", "fork", "launch", "launch", "launch", "done", "done",
    "done", "sample", "sample", "finish", "finish", "preempt", "preempt", "forget", "expire", "close",
    "pause", "pause", "pause", "arrive", "wait", "tool_call", "tool_call",
)  # fmt: skip

Owner = tuple[str, str]  # tenant and salt
Written = tuple[Owner, int]  # what a slot holds: a digest of the prefix that ends with its token
Memory = dict[int, list[Written | None]]  # by block


def kv_request(
    request_id: str = "a", prompt: list[int] | int = 4, *, tenant: str = "", salt: str = "", session_id: str = "",
    session_ttl: float = 60.0, output: list[int] | None = None,
) -> Request:  # fmt: skip
    """Make a request; a number as `prompt` is a length, of tokens 0, 1, 2, …"""
    tokens = np.array(list(range(prompt)) if isinstance(prompt, int) else prompt, dtype=np.int32)
    request = Request(
        request_id, tokens, SamplingParams(), max_tokens=1000, arrival_time=0.0, tenant=tenant, cache_salt=salt,
        session_id=session_id, session_ttl=session_ttl,
    )  # fmt: skip
    request.output_token_ids.extend(output or [])
    return request


def tokens_of(request: Request) -> tuple[int, ...]:
    return (*request.prompt_token_ids.tolist(), *request.output_token_ids)


def prefixes_of(request: Request) -> list[Written]:
    """Return the content that belongs into the slots of its tokens."""
    owner, digests = (request.tenant, request.cache_salt), accumulate(tokens_of(request), _chain, initial=1)
    return [(owner, digest) for digest in islice(digests, 1, None)]


def _chain(parent: int, token: int) -> int:
    return (parent * 1_000_003 + token + 7) % (2**61 - 1)


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@dataclass(eq=False)
class NaiveRow:
    request: Request
    table: list[int]
    num_written: int  # tokens whose KV is there, or promised by the hit
    num_computed: int  # of these, those of batches that are done
    num_sealed: int  # leading blocks whose content was made known
    last_step: int = -1  # the batch that named it last; -1: none has


@dataclass(eq=False)
class NaiveBatch:
    ends: dict[int, tuple[NaiveRow, int]]  # row → who it was, and how far it is computed then
    tables: list[list[int]] = field(default_factory=list)  # of rows that left meanwhile


@dataclass(eq=False)
class NaiveSession:
    owner: Owner
    tokens: tuple[int, ...]  # that it keeps
    expires_at: float


class KVMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([4, 6, 8, 12, 16, 24]),
        block_size=st.sampled_from([4, 2, 1, 16]),
        num_host_blocks=st.sampled_from([8, 30, 3, 0]),
        max_session_blocks=st.sampled_from([None, None, 3]),
        max_tenant_blocks=st.sampled_from([None, None, 6]),
        seed=st.integers(0, 999),
    )
    def start(
        self, num_blocks: int, block_size: int, num_host_blocks: int, max_session_blocks: int | None,
        max_tenant_blocks: int | None, seed: int,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.max_session_blocks, self.max_tenant_blocks = max_session_blocks, max_tenant_blocks
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=True,
            num_host_blocks=num_host_blocks,
            session_limits=SessionLimits(
                MAX_SESSIONS, max_session_blocks, {"*": TenantLimits(max_blocks=max_tenant_blocks)}
            ),
        )
        self.base = self.random.choices(range(4), k=min(block_size * 4, 24))
        self.memory: Memory = {block_id: [None] * block_size for block_id in range(num_blocks)}
        self.host_memory: Memory = {slot: [None] * block_size for slot in range(num_host_blocks)}
        self.rows: dict[int, NaiveRow] = {}
        self.batches: dict[int, NaiveBatch] = {}
        self.sessions: dict[tuple[str, str], NaiveSession] = {}  # in the order of use
        self.paused: set[tuple[str, str]] = set()
        self.findable: dict[int, Written] = {}  # blocks of the pool that a hit may name
        self.num_requests = 0
        self.num_steps = 0
        self.now = 0.0

    # --- the model ----------------------------------------------------------------------------------------------

    def owner(self, request: Request) -> Owner:
        return request.tenant, request.cache_salt

    def block_contents(self, request: Request) -> list[Written]:
        """Return the content of the last slot of each full block."""
        return prefixes_of(request)[self.kv.block_size - 1 :: self.kv.block_size]

    def references(self) -> Counter[int]:
        tables = [row.table for row in self.rows.values()]
        tables += [table for batch in self.batches.values() for table in batch.tables]
        return Counter(block_id for table in tables for block_id in table)

    def num_free(self) -> int:
        """Count the blocks that neither a row nor a transfer holds."""
        held = self.references().keys() | set(invariants.held_sources(self.kv.transfers))
        return self.kv.num_blocks - len(held)

    def num_pool_hits(self, request: Request) -> int:
        """Count the leading blocks that are in the pool."""
        known = set(self.findable.values())
        limit = (request.num_tokens - 1) // self.kv.block_size
        return sum(1 for _ in takewhile(known.__contains__, self.block_contents(request)[:limit]))

    def num_host_hits(self, request: Request, num_pool_hits: int) -> int:
        """Count the blocks behind them that the host tier has."""
        pending = dict(zip(self.kv.transfers._next.out_slots, self.kv.transfers._out_blocks, strict=True))
        tails = {session.tail_key for session in self.kv.sessions._sessions.values()}
        slots = [slot for key, slot in self.kv._host._blocks.items() if key not in tails]
        known = {(self.memory[pending[slot]] if slot in pending else self.host_memory[slot])[-1] for slot in slots}
        limit = (request.num_tokens - 1) // self.kv.block_size
        return sum(1 for _ in takewhile(known.__contains__, self.block_contents(request)[num_pool_hits:limit]))

    def num_session_tokens(self, request: Request, num_hit_blocks: int) -> int:
        """Count the tokens beyond whole blocks that a session in the pool must bring."""
        session = self.sessions.get((request.tenant, request.session_id))
        actual = self.kv.sessions.get(request.tenant, request.session_id)
        if session is None or actual is None or actual.tail_block < 0 or session.owner != self.owner(request):
            return 0
        size = self.kv.block_size
        num_full = len(session.tokens) // size
        common = min(num_common(session.tokens, tokens_of(request)), request.num_tokens - 1)
        if num_full != num_hit_blocks or common < num_full * size or len(actual.keys) != num_full:
            return 0
        return common - num_full * size

    # --- rules --------------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(KINDS), count=st.integers(1, 4))
    def act(self, kind: str, count: int) -> None:
        for _ in range(count):
            self.act_once(kind)

    @rule(count=st.integers(4, 16))
    def live(self, count: int) -> None:
        for _ in range(count):
            self.act_once(self.random.choice(KINDS))

    def act_once(self, kind: str) -> None:
        if kind in ("turn", "tool_call", "enter", "resume", "fork") and len(self.rows) == MAX_ROWS:
            kind = "finish"
        if kind in ("sample", "finish", "preempt", "forget") and not self.rows:
            kind = "enter"
        getattr(self, kind)()
        self.keeps_its_promises()

    def turn(self) -> None:
        """Run a request of a session from its entry to its end, while others stand still."""
        if self.sessions and self.random.random() < 0.6:
            self.resume()
        else:
            self.enter()
        self.launch()
        while self.batches:
            self.done()
        if self.rows:
            self.finish(max(self.rows, key=lambda index: int(self.rows[index].request.request_id[1:])))

    # --- requests come ------------------------------------------------------------------------------------------

    def enter(self) -> None:
        draw = self.random
        own = draw.choices(range(4), k=draw.randint(1, 6))
        prompt = [*self.base[: draw.randint(0, len(self.base))], *own]
        owner = (draw.choice(TENANTS), draw.choice(SALTS))
        ttl = draw.choice([0.0, 5.0, 50.0, 50.0, 50.0])
        self.enter_request(self.request(prompt, owner, draw.choice(SESSIONS), ttl), draw.choice([0, 0, 1]))

    def resume(self) -> None:
        """Begin the next turn of a session, at times of an edited one, or under another salt."""
        draw = self.random
        if not self.sessions:
            return
        name = draw.choice(list(self.sessions))
        session = self.sessions[name]
        kept = session.tokens[: len(session.tokens) - draw.choice([0, 0, 0, 1, 3])]
        prompt = [*kept, *draw.choices(range(4), k=draw.randint(0, 5))]
        owner = (name[0], draw.choice([session.owner[1], session.owner[1], "y"]))
        if prompt:
            self.enter_request(self.request(prompt, owner, name[1], 50.0))

    def request(self, prompt: list[int], owner: Owner, session_id: str, ttl: float) -> Request:
        self.num_requests += 1
        return kv_request(
            f"r{self.num_requests}", prompt, tenant=owner[0], salt=owner[1], session_id=session_id, session_ttl=ttl
        )

    def enter_request(self, request: Request, keep_free: int = 0) -> None:
        hit = self.kv.prefixes.find(request)
        assert hit.num_tokens <= request.num_tokens - 1
        assert len(hit.block_ids) == self.num_pool_hits(request)
        assert len(hit.host_keys) == self.num_host_hits(request, len(hit.block_ids))
        contents = self.block_contents(request)
        assert [self.findable[block_id] for block_id in hit.block_ids] == contents[: len(hit.block_ids)]
        tail = hit.num_tokens - hit.num_blocks * self.kv.block_size
        if hit.tail_block >= 0 or not hit.tail_key:
            assert tail == self.num_session_tokens(request, hit.num_blocks)
        self.give_table(request, hit, keep_free)

    def fork(self) -> None:
        ready = [i for i, row in self.rows.items() if row.num_computed >= row.request.num_prompt_tokens - 1]
        if ready:
            leader_row = self.random.choice(ready)
            leader = self.rows[leader_row].request
            child = self.request(leader.prompt_token_ids.tolist(), self.owner(leader), "", 0.0)
            hit = self.kv.fork_hit(leader_row, child)
            assert hit in (NO_HIT, hit._replace(num_tokens=child.num_tokens - 1))
            if hit is not NO_HIT:
                self.note_commit(self.rows[leader_row], len(hit.block_ids))
            self.give_table(child, hit)

    def give_table(self, request: Request, hit: PrefixHit, keep_free: int = 0) -> None:
        num_new = self.kv.num_blocks_for(request.num_tokens) - len(hit.block_ids)
        references, held = self.references(), invariants.held_sources(self.kv.transfers)
        revived = [b for b in hit.block_ids if not references[b] and b not in held]
        num_left = self.num_free() - num_new - len(revived)
        is_tail_free = hit.tail_block >= 0 and not references[hit.tail_block] and hit.tail_block not in held
        fits = num_left >= keep_free + (keep_free > 0 and is_tail_free)  # the next batch copies from the tail
        takes_over = num_left == 0 and is_tail_free
        row = min(set(range(MAX_ROWS)) - self.rows.keys())
        before = self.snapshot()
        assert self.kv.allocate(row, request.num_tokens, hit, keep_free=keep_free) == fits
        if not fits:
            assert self.snapshot() == before
            return
        table = list(self.kv.block_table(row))
        assert table[: len(hit.block_ids)] == list(hit.block_ids)
        self.take(table[len(hit.block_ids) :])
        if takes_over and hit.session is not None:  # there was no block to copy its tail to
            session = self.sessions[hit.session.name]
            session.tokens = session.tokens[: len(session.tokens) // self.kv.block_size * self.kv.block_size]
        self.rows[row] = NaiveRow(request, table, hit.num_tokens, hit.num_tokens, len(hit.block_ids))
        self.note_sessions()

    def snapshot(self) -> tuple[object, ...]:
        kv = self.kv
        return list(free_blocks(kv._pool)), list(kv._pool.ref_count), dict(kv._host._blocks), len(kv.sessions)

    def take(self, block_ids: list[int]) -> None:
        """Note blocks that are new to their row: no other row may hold them, and their content is given up."""
        references = self.references()
        for block_id in block_ids:
            assert references[block_id] == 0
            assert self.kv._pool.ref_count[block_id] == 1
            assert self.kv._pool._keepers.get(block_id, 0) == 0
            self.findable.pop(block_id, None)

    # --- batches ------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Compute some tokens of every row that has just entered, and of some others."""
        if not self.rows or len(self.batches) == 2:
            return
        step_id, self.num_steps = self.num_steps, self.num_steps + 1
        new = [i for i, row in self.rows.items() if row.last_step < 0]
        old = [i for i, row in self.rows.items() if row.last_step >= 0 and row.num_written < row.request.num_tokens]
        chosen = [i for i in old if self.random.random() < 0.8]
        batch = NaiveBatch({}, [self.move(step_id)])
        for index in (*new, *chosen):
            row = self.rows[index]
            left = row.request.num_tokens - row.num_written
            end = row.num_written + self.random.choice([left, left, self.random.randint(1, left)])
            self.write(row, end)
            row.last_step = step_id
            batch.ends[index] = (row, end)
        self.batches[step_id] = batch

    def move(self, step_id: int) -> list[int]:
        """Carry out the transfers of the batch in the promised order; return blocks that came back for sessions."""
        arriving = dict(self.kv.transfers.arrivals)
        keep_free = self.random.choice([0, 0, 2])
        moves = self.kv.take_transfers(step_id, keep_free=keep_free)
        for target in (moves.copy_targets, moves.swap_in_blocks):
            assert len(set(target.tolist())) == len(target), "a block is filled twice"
        assert len(set(moves.swap_out_slots.tolist())) == len(moves.swap_out_slots), "a slot is filled twice"
        assert not set(moves.copy_sources.tolist()) & {*moves.copy_targets.tolist(), *moves.swap_in_blocks.tolist()}
        assert not set(moves.swap_in_blocks.tolist()) & set(moves.copy_targets.tolist())
        for block_id, slot in zip(moves.swap_out_blocks.tolist(), moves.swap_out_slots.tolist(), strict=True):
            self.host_memory[slot] = list(self.memory[block_id])
        for slot, block_id in zip(moves.swap_in_slots.tolist(), moves.swap_in_blocks.tolist(), strict=True):
            self.memory[block_id] = list(self.host_memory[slot])
        for source, target in zip(moves.copy_sources.tolist(), moves.copy_targets.tolist(), strict=True):
            self.memory[target] = list(self.memory[source])
        of_rows = {block_id for arrival in arriving.values() for block_id in arrival.blocks}
        fetched = [block_id for block_id in moves.swap_in_blocks.tolist() if block_id not in of_rows]
        assert not fetched or self.kv.num_free_blocks >= keep_free
        self.note_fetched(fetched)
        for index, arrival in arriving.items():
            row = self.rows[index]
            self.note_commit(row, row.num_written // self.kv.block_size if arrival.keys else 0)
        return fetched

    def note_fetched(self, block_ids: list[int]) -> None:
        references = self.references()
        for block_id in block_ids:
            assert references[block_id] == 0 and self.kv._pool.ref_count[block_id] == 1
            assert self.kv._pool._keepers.get(block_id, 0) == 1
            self.findable.pop(block_id, None)
        for block_id in block_ids:
            content = self.memory[block_id][-1]
            if self.kv._pool.hash_of(block_id) is not None:
                assert content is not None and content not in self.findable.values()
                self.findable[block_id] = content
        self.note_sessions()

    def write(self, row: NaiveRow, end: int) -> None:
        """Compute up to `end`; all that the row attends to must be there."""
        size, references, contents = self.kv.block_size, self.references(), prefixes_of(row.request)
        for position in range(row.num_written, end):
            block_id = row.table[position // size]
            assert references[block_id] == 1, "a shared block is written"
            self.memory[block_id][position % size] = contents[position]
        row.num_written = end
        self.read(row, end)

    def read(self, row: NaiveRow, end: int) -> None:
        found = [content for block_id in row.table for content in self.memory[block_id]]
        assert found[:end] == prefixes_of(row.request)[:end], "a slot holds something else"

    def done(self) -> None:
        if not self.batches:
            return
        step_id = min(self.batches)
        batch = self.batches.pop(step_id)
        self.kv.transfers.done(step_id)
        for index, (row, end) in batch.ends.items():
            if self.rows.get(index) is row:
                row.num_computed = end
                self.commit(index)

    def commit(self, index: int) -> None:
        row = self.rows[index]
        self.kv.commit(index, row.request, row.num_computed)
        if index not in self.kv.transfers.arrivals:
            self.note_commit(row, row.num_computed // self.kv.block_size)

    def note_commit(self, row: NaiveRow, num_full: int) -> None:
        """Note that its full blocks can be found; of two blocks with the same content the first keeps its name."""
        first, row.num_sealed = row.num_sealed, max(row.num_sealed, num_full)
        for index, content in enumerate(self.block_contents(row.request)[first:num_full], first):
            if content not in self.findable.values():
                self.findable[row.table[index]] = content

    def sample(self) -> None:
        """Add tokens to a row; it grows by a block when they no longer fit."""
        index = self.any_row()
        row = self.rows[index]
        row.request.output_token_ids.extend(self.random.choices(range(4), k=self.random.randint(1, 4)))
        while row.request.num_tokens > len(row.table) * self.kv.block_size:
            fits = self.num_free() >= 1
            new_blocks = self.kv.grow([index])
            assert (new_blocks is not None) == fits
            if new_blocks is None:
                del row.request.output_token_ids[-1]
                continue
            self.take(new_blocks)
            row.table += new_blocks
        self.note_sessions()

    # --- requests go --------------------------------------------------------------------------------------------

    def finish(self, index: int | None = None) -> None:
        """End a row; its session keeps what the row has computed."""
        if index is None:
            index = self.any_row()
        row = self.rows[index]
        is_arriving = index in self.kv.transfers.arrivals
        self.commit(index)
        self.kv.keep_session(index, row.request, row.num_computed, self.now)
        if row.request.session_id and not is_arriving:
            self.keep(row.request, row.num_computed)
        self.leave(index)
        self.note_sessions()

    def keep(self, request: Request, num_computed: int) -> None:
        limits = [limit for limit in (self.max_session_blocks, self.max_tenant_blocks) if limit is not None]
        num_tokens = min([num_computed, *(limit * self.kv.block_size for limit in limits)])
        name = (request.tenant, request.session_id)
        self.sessions.pop(name, None)
        if request.session_ttl > 0.0:
            kept = tokens_of(request)[:num_tokens]
            self.sessions[name] = NaiveSession(self.owner(request), kept, self.now + request.session_ttl)

    def preempt(self) -> None:
        index = self.any_row()
        row = self.rows[index]
        self.commit(index)
        num_there = self.kv.offload(index, row.request, row.num_computed)
        assert num_there <= row.num_computed // self.kv.block_size
        self.leave(index)
        self.note_sessions()  # they may have made room in the host tier

    def forget(self) -> None:
        """Drop a row whose numbers were not finite: none of its blocks is found again."""
        index = self.any_row()
        table = self.rows[index].table
        names = [name for block_id in table if (name := self.kv._pool.hash_of(block_id)) is not None]
        for block_id in table:
            self.findable.pop(block_id, None)
        self.kv.forget(index)
        assert all(self.kv._pool.lookup(name) is self.kv._host.lookup(name) is None for name in names)
        self.leave(index)

    def any_row(self) -> int:
        return self.random.choice(sorted(self.rows))

    def leave(self, index: int) -> None:
        row = self.rows.pop(index)
        in_flight = row.last_step in self.batches
        if in_flight:
            self.batches[row.last_step].tables.append(row.table)
        self.kv.free(index, after_step=row.last_step if in_flight else None)

    # --- tools run ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """A session's turn has ended with calls of tools."""
        tenant, session_id = self.random.choice(list(self.sessions) or [("", "one")])
        tools = self.random.sample(TOOLS, k=self.random.randint(0, 2))
        self.kv.sessions.pause(tenant, session_id, tools, self.now)
        self.note_sessions()

    def tool_call(self) -> None:
        """Let tools run while another turn needs the blocks of their session, until it is due to come back."""
        self.turn()
        if self.sessions:
            tenant, session_id = list(self.sessions)[-1]
            self.kv.sessions.pause(tenant, session_id, ["read"], self.now)
        self.turn()
        for _ in range(len(self.rows) if self.random.random() < 0.5 else 0):
            self.finish()
        self.wait()
        self.note_sessions()
        if not self.rows and len(self.batches) < 2:
            self.enter()
        self.launch()

    def arrive(self) -> None:
        self.kv.sessions.arrive(self.random.choice(TENANTS), self.random.choice(SESSIONS[1:]), self.now)

    def wait(self) -> None:
        """Let time pass, until some sessions should come back."""
        self.now += self.random.choice([0.01, 0.3, 2.0])
        self.kv.sessions.now = self.now

    # --- sessions end -------------------------------------------------------------------------------------------

    def expire(self) -> None:
        self.now += self.random.choice([1.0, 6.0, 60.0])
        self.kv.sessions.expire(self.now)
        self.sessions = {name: s for name, s in self.sessions.items() if s.expires_at > self.now}
        self.note_sessions()

    def close(self) -> None:
        tenant, session_id = self.random.choice(TENANTS), self.random.choice(SESSIONS[1:])
        known = self.sessions.pop((tenant, session_id), None)
        try:
            self.kv.sessions.close(tenant, session_id)
        except NotFound:
            assert known is None
        else:
            assert known is not None
        self.note_sessions()

    def note_sessions(self) -> None:
        """Check that evicted sessions were the least recently used, of their tenant or of all, unless tools ran."""
        actual = self.kv.sessions._sessions
        assert list(actual) == [name for name in self.sessions if name in actual]
        for name in self.sessions.keys() - actual.keys():
            survivors = [other for other in list(self.sessions)[: list(self.sessions).index(name)] if other in actual]
            survivors = [other for other in survivors if actual[other].pause is None]
            assert name in self.paused or all(other[0] != name[0] or not actual[other].blocks for other in survivors)
        self.sessions = {name: session for name, session in self.sessions.items() if name in actual}
        self.paused = {name for name, session in actual.items() if session.pause is not None}

    # --- always -------------------------------------------------------------------------------------------------

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        check_cache(kv)
        assert kv.num_free_blocks == self.num_free()
        assert kv.update_stats().num_sessions == len(self.sessions) <= MAX_SESSIONS
        for tenant in TENANTS:
            assert self.max_tenant_blocks is None or kv.sessions.num_blocks(tenant) <= self.max_tenant_blocks
        for row in self.rows.values():
            if row.last_step >= 0:
                self.read(row, row.num_written)
        for block_id, content in self.findable.items():
            assert kv._pool.hash_of(block_id) is not None
            assert self.memory[block_id][-1] == content, "a block that can be found holds something else"

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None
        if not hasattr(self, "kv") or has_failed:
            return
        for index in list(self.rows):
            self.leave(index)
        self.kv.take_transfers(self.num_steps)
        self.kv.transfers.done(self.num_steps)
        for step_id in list(self.batches):
            self.kv.transfers.done(step_id)
        check_cache(self.kv)
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.kv.transfers.num_returning_blocks() == 0
        self.kv.sessions.expire(self.now + 1000.0)
        stats = self.kv.update_stats()
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert (stats.num_sessions, stats.num_session_blocks) == (0, 0)
