from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.errors import NotFound, require
from tidewheel.event_heap import EventHeap
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.prefix import KVSession, SessionName, extend_block_hashes, parent_hash, tokens_between
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.request import Request
from tidewheel.tenants import TenantLimits, account_of, limits_of


class SessionLimits(NamedTuple):
    max_sessions: int = 4096  # of all tenants
    max_session_blocks: int | None = None
    tenants: Mapping[str, TenantLimits] = MappingProxyType({})


class TenantSessions(dict[str, KVSession]):
    """Sessions of one tenant by id, least recently used first."""

    num_blocks = 0


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
    ends. Two requests may use a session at once: they share full blocks and copy the partial one. Above
    `max_sessions`, drop the least recently used session of the tenant with most, in the account with most.
    """

    def __init__(
        self, pool: BlockPool, host: BlockPool, transfers: TransferQueue, limits: SessionLimits, block_size: int
    ) -> None:
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._block_size = block_size
        self.limits = limits
        self._sessions: dict[SessionName, KVSession] = {}
        self._resident: OrderedDict[SessionName, KVSession] = OrderedDict()  # with blocks, least recently used first
        self._tenants: dict[str, TenantSessions] = {}
        self._accounts = Tally()
        self._members: defaultdict[str, Tally] = defaultdict(Tally)  # tenants by account
        self._expiries = EventHeap[KVSession](lambda event: self.get(*event.subject.name) is event.subject)

    def reconfigure(self, limits: SessionLimits) -> None:
        sessions = self._sessions.values()
        SessionStore.__init__(self, self._pool, self._host, self._transfers, limits, self._block_size)
        for session in sessions:
            self.put(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, session_id: str) -> KVSession | None:
        return self._sessions.get((tenant, session_id))

    def num_blocks(self, tenant: str) -> int:
        return self._tenants[tenant].num_blocks if tenant in self._tenants else 0

    def most_blocks(self, tenant: str, num_blocks: int) -> int:
        """Return `num_blocks`, at most the blocks that one session of the tenant may keep."""
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

    def put(self, session: KVSession) -> None:
        """Add a session; drop an older one of that name, and sessions beyond the limits."""
        self.remove(*session.name)
        self._sessions[session.name] = session
        of_tenant = self._tenants.setdefault(session.tenant, TenantSessions())
        of_tenant[session.session_id] = session
        of_tenant.num_blocks += len(session.blocks)
        if session.blocks:
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
        if not self.remove(tenant, session_id):
            raise NotFound(f"session {session_id!r} is not known: it was never kept, expired, was closed or evicted")

    def expire(self, now: float) -> None:
        for event in self._expiries.pop_due(now):
            self._drop(event.subject)

    def oldest_resident(self) -> KVSession | None:
        return next(iter(self._resident.values()), None)

    def reclaim(self, num_free_blocks: int) -> None:
        while self._pool.num_free < num_free_blocks:
            session = self.oldest_resident()
            if session is None:
                return
            if self._write_out(session):
                self.give_up_blocks(session)
            else:
                self._drop(session)

    def give_up_blocks(self, session: KVSession, num_kept: int = 0) -> None:
        given = session.blocks[num_kept:]
        self._tenants[session.tenant].num_blocks -= len(given)
        session.blocks = session.blocks[:num_kept]
        if not session.blocks:
            self._resident.pop(session.name, None)
        self._pool.release(given[::-1])

    def surrender_tail(self, session: KVSession) -> None:
        self.give_up_blocks(session, len(session.blocks) - 1)
        session.tail_tokens = session.tail_key = b""

    def check_invariants(self) -> None:
        resident = [name for name, session in self._sessions.items() if session.blocks]
        require(resident == list(self._resident), "sessions with blocks are listed wrongly")
        for tenant, of_tenant in self._tenants.items():
            own = {name: session for (of, name), session in self._sessions.items() if of == tenant}
            require(list(own) == list(of_tenant) and bool(own), f"sessions of {tenant!r} are listed wrongly")
            count = sum(len(session.blocks) for session in own.values())
            require(count == of_tenant.num_blocks, f"blocks of tenant {tenant!r} are miscounted")
            counted = self._members[account_of(self.limits.tenants, tenant)][tenant]
            require(counted == len(own), f"sessions of {tenant!r} are miscounted")
        totals = {account: members.total() for account, members in self._members.items()}
        require(totals == self._accounts, "accounts are miscounted")
        require(self._accounts.total() == len(self._sessions), "a session belongs to no tenant")
        waiting = set(map(id, self._expiries))
        require(all(id(session) in waiting for session in self._sessions.values()), "a session never expires")
        require(len(self._sessions) <= self.limits.max_sessions, "there are too many sessions")

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

    def _write_out(self, session: KVSession) -> bool:
        blocks = self._pool.lookup_prefix(session.keys)  # wrong content is not found
        keys = session.keys[: len(blocks)]
        if session.tail_tokens and keys == session.keys:
            blocks, keys = (*blocks, session.tail_block), (*keys, session.tail_key)
        return self._transfers.swap_out(blocks, keys) > 0

    def _drop(self, session: KVSession) -> None:
        self.give_up_blocks(session)
        self._host.drop(session.tail_key)
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
        if not self._accounts[account]:
            del self._members[account]
        return account

    def _first_to_go(self, account: str) -> KVSession:
        return next(iter(self._tenants[self._members[account].leader()].values()))
