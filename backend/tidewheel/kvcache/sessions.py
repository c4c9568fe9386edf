import heapq
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.errors import NotFound
from tidewheel.event_heap import EventHeap
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.pauses import Duration, Pause, ToolDurations
from tidewheel.kvcache.prefix import KVSession, SessionName, extend_block_hashes, parent_hash, tokens_between
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.request import Request
from tidewheel.tenants import TenantLimits, account_of, limits_of

FETCHED_BLOCKS = 16  # brought back in one step
FURTHER = 1.5  # times as far as the session that is brought back: the next turn of one that makes room for it
FEW = 64  # up to so many paused sessions are ranked anew whenever one has to leave
RANKED = 128  # with more than `FEW`, so many are ranked, and the order is used for `RANKED_S`
RANKED_S = 0.25  # ranking 4,096 sessions takes 4 ms
AT_ONCE = Duration(-7.0, 1.0)  # until a turn that has arrived begins


class SessionLimits(NamedTuple):
    max_sessions: int = 4096  # of all tenants
    max_session_blocks: int | None = None
    tenants: Mapping[str, TenantLimits] = MappingProxyType({})


class DepartureOrder(list[tuple[KVSession, Pause | None]]):
    """Paused sessions of a tier, each with the pause by which it was ranked at `ranked_at`. The last leaves first."""

    ranked_at = -math.inf


class Tally(Counter[str]):
    """Counts by name. The leader has the highest; of equal counts, the one that changed longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, OrderedDict[str, None]] = {}

    def add(self, name: str, change: int) -> None:
        if count := self.pop(name, 0):
            del self._names[count][name]
            if not self._names[count]:
                del self._names[count]
        if count := count + change:
            self[name] = count
            self._names.setdefault(count, OrderedDict())[name] = None

    def leader(self) -> str:
        return next(iter(self._names[max(self._names)]))


class SessionStore:
    """Sessions by name, and by tenant in order of use, with the blocks that they keep between turns.

    The pool counts the blocks as free. Under pressure the least recently used session moves to the host tier, or
    ends. Sessions whose tools run follow, or leave first if their tenant holds more for its weight: of the tenant
    with most, the one whose next turn is expected last. They come back before that turn. All tenants without an entry
    count as one, if any has an entry. Two requests may use a session at once: they share full blocks
    and copy the partial one. Above `max_sessions`, drop the least recently used session of the tenant with most, in
    the account with most.
    """

    def __init__(
        self, pool: BlockPool, host: BlockPool, transfers: TransferQueue, limits: SessionLimits, block_size: int
    ) -> None:
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._block_size = block_size
        self.limits = limits
        self.now = 0.0
        self.tools = ToolDurations()
        self._start()

    def _start(self) -> None:
        self._sessions: dict[SessionName, KVSession] = {}
        # With blocks and without a pause, least recently used first.
        self._resident: OrderedDict[SessionName, KVSession] = OrderedDict()
        self._paused: dict[SessionName, KVSession] = {}
        self._leave_pool, self._leave_host = DepartureOrder(), DepartureOrder()
        self._num_blocks = Tally()  # in the pool, by tenant
        self._held = Tally()  # likewise, by share
        self._returns = EventHeap[KVSession](lambda event: self._is_due(event.subject, event.time))
        self._coming: deque[KVSession] = deque()
        self._tenants: defaultdict[str, dict[str, KVSession]] = defaultdict(dict)  # by id, least recently used first
        self._accounts = Tally()
        self._members: defaultdict[str, Tally] = defaultdict(Tally)  # tenants by account
        self._expiries = EventHeap[KVSession](lambda event: self.get(*event.subject.name) is event.subject)

    def reconfigure(self, limits: SessionLimits) -> None:
        sessions = self._sessions.values()
        self.limits = limits
        self._start()
        for session in sessions:
            self.put(session)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def get(self, tenant: str, session_id: str) -> KVSession | None:
        return self._sessions.get((tenant, session_id))

    def num_blocks(self, tenant: str) -> int:
        return self._num_blocks[tenant]

    def most_blocks(self, tenant: str, num_blocks: int) -> int:
        """Return how many of a session's `num_blocks` blocks it may keep, by the limits of sessions and tenant."""
        limits = [self.limits.max_session_blocks, limits_of(self.limits.tenants, tenant).max_blocks]
        return min([num_blocks, *(limit for limit in limits if limit is not None)])

    def keep(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> None:
        """Keep the blocks of the computed tokens, within quotas. End the session if `session_ttl` is 0."""
        if request.session_ttl <= 0.0:
            self.remove(request.tenant, request.session_id)
            return
        session = self._make(request, table, num_computed_tokens, now)
        self._pool.keep(session.blocks)
        self.put(session)

    def pause(self, tenant: str, session_id: str, tools: Sequence[str], now: float) -> None:
        """Note that a session's turn has ended with calls of tools; ignore an unknown session."""
        session = self.get(tenant, session_id)
        if session is not None and tools:
            self.now = now
            session.pause = self.tools.begin(tenant, session_id, tools, now)
            self._resident.pop(session.name, None)
            self._paused[session.name] = session
            if not session.blocks:
                self._keep_in_host(session)
                self._queue_return(session, session.pause)

    def arrive(self, tenant: str, session_id: str, now: float) -> None:
        """Note the arrival of a session's next turn."""
        self.tools.end(tenant, session_id, now)
        session = self.get(tenant, session_id)
        if session is not None and session.pause is not None:
            session.pause = Pause(now, AT_ONCE)

    def put(self, session: KVSession) -> None:
        """Add a session; drop an older one of that name, and sessions beyond the limits."""
        self.remove(*session.name)
        self._sessions[session.name] = session
        of_tenant = self._tenants[session.tenant]
        of_tenant[session.session_id] = session
        self._add_blocks(session.tenant, len(session.blocks))
        if session.pause is not None:
            self._paused[session.name] = session
            self._queue_return(session, session.pause)
        elif session.blocks:
            self._resident[session.name] = session
        account = self._count(session.tenant, 1)
        self._expiries.push(session.expires_at, session, len(self._sessions))
        limits = limits_of(self.limits.tenants, session.tenant)
        while limits.max_blocks is not None and self.num_blocks(session.tenant) > limits.max_blocks:
            self._drop(next(one for one in of_tenant.values() if one.blocks))
        while limits.max_sessions is not None and self._accounts[account] > limits.max_sessions:
            self._drop(self._first_to_go(account))
        while len(self._sessions) > self.limits.max_sessions:
            self._drop(self._first_to_go(self._accounts.leader()))

    def remove(self, tenant: str, session_id: str) -> bool:
        session = self.get(tenant, session_id)
        if session is not None:
            self._drop(session)
        return session is not None

    def close(self, tenant: str, session_id: str) -> None:
        """End a session and free its blocks. Raise `NotFound` if unknown."""
        self.tools.forget(tenant, session_id)
        if not self.remove(tenant, session_id):
            raise NotFound(f"session {session_id!r} is not known: it was never kept, expired, was closed or evicted")

    def expire(self, now: float) -> None:
        for event in self._expiries.pop_due(now):
            self._drop(event.subject)

    def oldest_resident(self) -> KVSession | None:
        return next(iter(self._resident.values()), None)

    def reclaim(self, num_free_blocks: int) -> None:
        while self._pool.num_free < num_free_blocks and (session := self._first_to_leave()) is not None:
            self._evict(session)

    def prefetch(self, keep_free: int) -> None:
        """Queue the return of a part of the session that is due next, while `keep_free` blocks stay free."""
        for event in self._returns.pop_due(self.now):
            self._coming.append(event.subject)
        if self._coming and not self._fetch(self._coming[0], keep_free):
            self._coming.popleft()

    def make_host_room(self, num_slots: int, session: KVSession | None = None) -> None:
        """Let go of sessions in the host tier that are expected later than `session`; None: of any that wait."""
        while self._host.num_free < num_slots:
            last = self._next_of(self._leave_host, lambda one: one is session or self._is_settled(one.host_slots))
            if last is None or last is session:
                return
            self._host.release(last.host_slots)
            last.host_slots = ()
            if not last.blocks:
                self._drop(last)

    def give_up_blocks(self, session: KVSession, num_kept: int = 0) -> None:
        given = session.blocks[num_kept:]
        self._add_blocks(session.tenant, -len(given))
        session.blocks = session.blocks[:num_kept]
        if not session.blocks:
            self._resident.pop(session.name, None)
        self._pool.release(given[::-1])

    def surrender_tail(self, session: KVSession) -> None:
        self.give_up_blocks(session, len(session.blocks) - 1)
        session.tail_tokens = session.tail_key = b""

    def _make(self, request: Request, table: list[int], num_computed_tokens: int, now: float) -> KVSession:
        size = self._block_size
        num_full = num_computed_tokens // size
        extend_block_hashes(request, num_full, size)
        hashes = request.block_hashes
        # One block of equal contents is found; wrong content is not.
        blocks = self._pool.lookup_prefix(hashes[: self.most_blocks(request.tenant, num_full)])
        keys = tuple(hashes[: len(blocks)])
        parent = parent_hash(request, len(keys))
        tail = b""
        if len(keys) == num_full < self.most_blocks(request.tenant, num_full + 1):
            tail = tokens_between(request, num_full * size, num_computed_tokens)
        tail_key = sha256(parent + tail).digest() if tail else b""
        if tail:
            blocks = (*blocks, table[num_full])
        expires_at = now + request.session_ttl
        return KVSession(request.tenant, request.session_id, parent, keys, tail, tail_key, blocks, expires_at)

    def _first_to_leave(self) -> KVSession | None:
        resident, paused = self.oldest_resident(), self._next_of(self._leave_pool, lambda one: bool(one.blocks))
        if resident is None or paused is None:
            return resident or paused
        return paused if self._held_for_weight(paused.tenant) > self._held_for_weight(resident.tenant) else resident

    def _next_of(self, departures: DepartureOrder, is_candidate: Callable[[KVSession], bool]) -> KVSession | None:
        """Return the next candidate in order; if there are many paused sessions, the order may be `RANKED_S` old."""
        if len(self._paused) <= FEW or self.now >= departures.ranked_at + RANKED_S:
            departures.clear()
        is_new = False
        while departures or not is_new:
            if not departures:
                self._rank(departures, is_candidate)
                is_new = True
                continue
            session, pause = departures[-1]
            if session.pause is pause and self._paused.get(session.name) is session and is_candidate(session):
                return session
            departures.pop()
        return None

    def _rank(self, departures: DepartureOrder, is_candidate: Callable[[KVSession], bool]) -> None:
        """Rank candidates: each time, of the share with most blocks for its weight, the one expected last."""
        by_share: defaultdict[str, list[KVSession]] = defaultdict(list)
        for session in filter(is_candidate, self._paused.values()):
            by_share[self._share_of(session.tenant)].append(session)
        ranked: list[tuple[float, KVSession]] = []  # with the blocks for its weight that its share holds by then
        for of_share in by_share.values():
            weight = limits_of(self.limits.tenants, of_share[0].tenant).weight
            num_held = sum(map(_num_held, of_share))
            for session in heapq.nlargest(RANKED, of_share, self._seconds_left):
                ranked.append((num_held / weight, session))
                num_held -= _num_held(session)
        first = heapq.nlargest(RANKED, ranked, key=lambda one: one[0])
        departures[:] = [(session, session.pause) for _, session in reversed(first)]
        departures.ranked_at = self.now

    def _share_of(self, tenant: str) -> str:
        return account_of(self.limits.tenants, tenant) if self.limits.tenants else tenant

    def _held_for_weight(self, tenant: str) -> float:
        return self._held[self._share_of(tenant)] / limits_of(self.limits.tenants, tenant).weight

    def _add_blocks(self, tenant: str, change: int) -> None:
        self._num_blocks.add(tenant, change)
        self._held.add(self._share_of(tenant), change)

    def _seconds_left(self, session: KVSession) -> tuple[bool, float]:
        """Return `(is_idle, seconds to the next turn)`; evicting a session that is not idle frees no blocks."""
        assert session.pause is not None
        num_full = min(len(session.keys), len(session.blocks))
        is_idle = not num_full or self._pool.ref_count[session.blocks[num_full - 1]] == 0
        return is_idle, session.pause.seconds_left(self.now)

    def _evict(self, session: KVSession) -> None:
        if not self._write_out(session):
            self._drop(session)
            return
        self.give_up_blocks(session)
        if session.pause is not None:
            self._queue_return(session, session.pause)

    def _queue_return(self, session: KVSession, pause: Pause) -> None:
        self._returns.push(pause.due, session, len(self._paused))

    def _is_due(self, session: KVSession, time: float) -> bool:
        """Return whether the session still waits for the turn whose pause had it return at `time`."""
        pause = session.pause
        return self._paused.get(session.name) is session and pause is not None and pause.due == time

    def _fetch(self, session: KVSession, keep_free: int) -> bool:
        """Queue the return of a session's next blocks. Return whether more may follow."""
        pool, start = self._pool, len(session.blocks)
        keys = session.keys[start : start + FETCHED_BLOCKS]
        most = limits_of(self.limits.tenants, session.tenant).max_blocks
        is_allowed = most is None or self.num_blocks(session.tenant) + len(keys) <= most
        if not is_allowed or not self._waits(session):
            return False
        blocks, slots = pool.lookup_prefix(keys), self._host.lookup_prefix(keys)
        if not blocks:
            self._host.touch(slots)
            taken = self._make_room(session, len(slots), keep_free) if slots else None
            if taken is None:
                self._host.free(slots)
                return False
            blocks = tuple(taken)
            pool.register_hashes(blocks, keys[: len(blocks)])
            self._transfers.fetch(slots, blocks)
        pool.keep(blocks)
        session.blocks += blocks
        self._add_blocks(session.tenant, len(blocks))
        return len(session.blocks) < len(session.keys)

    def _make_room(self, session: KVSession, num_blocks: int, keep_free: int) -> list[int] | None:
        """Take blocks that are free, or of sessions expected much later; None if there are too few."""
        pool = self._pool
        if pool.num_free + pool.num_kept - num_blocks < keep_free:
            return None
        least = FURTHER * self._seconds_left(session)[1]
        while pool.num_free < num_blocks:
            last = self._first_to_leave()
            if last is None or (last.pause is not None and self._seconds_left(last) < (True, least)):
                return None
            self._evict(last)
        return pool.allocate(num_blocks) if self._waits(session) else None

    def _waits(self, session: KVSession) -> bool:
        pause = session.pause
        return self._paused.get(session.name) is session and pause is not None and pause.duration is not AT_ONCE

    def _is_settled(self, slots: Sequence[int]) -> bool:
        """Return whether no step in flight reads or writes the slots, so that letting go frees them."""
        return bool(slots) and self._host.ref_count[slots[-1]] == 0

    def _keep_in_host(self, session: KVSession) -> None:
        keys = (*session.keys, session.tail_key) if session.tail_key else session.keys
        slots = tuple(slot for key in keys if (slot := self._host.lookup(key)) is not None)
        self._host.keep(slots)
        self._host.release(session.host_slots)
        session.host_slots = slots

    def _write_out(self, session: KVSession) -> bool:
        blocks = self._pool.lookup_prefix(session.keys)  # wrong content is not found
        keys = session.keys[: len(blocks)]
        if session.tail_block >= 0 and keys == session.keys:
            blocks, keys = (*blocks, session.tail_block), (*keys, session.tail_key)
        if session.pause is None or not self._host.num_blocks:
            return self._transfers.swap_out(blocks, keys) > 0
        self._keep_in_host(session)
        self.make_host_room(sum(self._host.lookup(key) is None for key in keys), session)
        num_written = self._transfers.swap_out(blocks, keys)
        self._keep_in_host(session)
        return num_written > 0

    def _drop(self, session: KVSession) -> None:
        self.give_up_blocks(session)
        self._host.release(session.host_slots)
        session.host_slots = ()
        self._host.drop(session.tail_key)
        self._paused.pop(session.name, None)
        del self._sessions[session.name]
        of_tenant = self._tenants[session.tenant]
        del of_tenant[session.session_id]
        if not of_tenant:
            del self._tenants[session.tenant]
        self._count(session.tenant, -1)

    def _count(self, tenant: str, change: int) -> str:
        account = account_of(self.limits.tenants, tenant)
        self._accounts.add(account, change)
        self._members[account].add(tenant, change)
        if not self._members[account]:
            del self._members[account]
        return account

    def _first_to_go(self, account: str) -> KVSession:
        return next(iter(self._tenants[self._members[account].leader()].values()))


def _num_held(session: KVSession) -> int:
    return len(session.blocks) + len(session.host_slots)
