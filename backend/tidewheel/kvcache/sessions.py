from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.errors import require
from tidewheel.event_heap import EventHeap
from tidewheel.tenants import TenantLimits, account_of, limits_of

SessionName = tuple[str, str]  # tenant, session_id


class SessionLimits(NamedTuple):
    max_sessions: int = 4096  # of all tenants
    max_session_blocks: int | None = None
    tenants: Mapping[str, TenantLimits] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class KVSession:
    """Cached conversation: digests of full blocks, and tokens of the partial last block."""

    tenant: str
    session_id: str
    parent: bytes  # digest before the tail
    keys: tuple[bytes, ...]
    tail_tokens: bytes  # int32 little endian; may be empty
    tail_key: bytes
    blocks: tuple[int, ...]  # in the pool, tail last; empty once given up
    expires_at: float

    @property
    def name(self) -> SessionName:
        return self.tenant, self.session_id

    @property
    def tail_block(self) -> int:
        return self.blocks[-1] if self.tail_tokens and self.blocks else -1


class SessionTally:
    """Number of sessions by name, and the name with most, in O(1)."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[int, OrderedDict[str, None]] = {}  # by count, longest unchanged first
        self._highest = 0

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, name: str, change: int) -> None:
        old = self._counts.pop(name, 0)
        if old:
            del self._names[old][name]
            if not self._names[old]:
                del self._names[old]
        new = old + change
        if new:
            self._counts[name] = new
            self._names.setdefault(new, OrderedDict())[name] = None
        if new > self._highest or self._highest not in self._names:
            self._highest = new

    def leader(self) -> str:
        return next(iter(self._names[self._highest]))


@dataclass(eq=False, slots=True)
class _TenantSessions:
    sessions: OrderedDict[SessionName, KVSession] = field(default_factory=OrderedDict)
    resident: OrderedDict[SessionName, KVSession] = field(default_factory=OrderedDict)
    num_blocks: int = 0


class SessionTable:
    """Sessions by name, and by tenant in order of use, in O(1) amortised.

    Above `max_sessions`, the account with most sessions loses the least recently used of its tenant with most.
    Callers release the blocks.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: dict[SessionName, KVSession] = {}
        self._resident: OrderedDict[SessionName, KVSession] = OrderedDict()  # with blocks, least recently used first
        self._tenants: dict[str, _TenantSessions] = {}
        self._accounts = SessionTally()
        self._members: dict[str, SessionTally] = {}
        self._expiries = EventHeap[KVSession](lambda event: self.get(*event.subject.name) is event.subject)

    def reconfigure(self, limits: SessionLimits) -> list[KVSession]:
        sessions = [self._drop(session) for session in list(self._sessions.values())]
        self.limits = limits
        return [gone for session in sessions for gone in self.put(session)]

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, session_id: str) -> KVSession | None:
        return self._sessions.get((tenant, session_id))

    def num_blocks(self, tenant: str) -> int:
        return self._tenants[tenant].num_blocks if tenant in self._tenants else 0

    def max_blocks(self, tenant: str) -> int | None:
        limits = [self.limits.max_session_blocks, limits_of(self.limits.tenants, tenant).max_blocks]
        return min((limit for limit in limits if limit is not None), default=None)

    def put(self, session: KVSession) -> list[KVSession]:
        """Add a session and return the evicted sessions, first an older one of that name."""
        former = self.remove(*session.name)
        self._sessions[session.name] = session
        of_tenant = self._tenants.setdefault(session.tenant, _TenantSessions())
        of_tenant.sessions[session.name] = session
        if session.blocks:
            self._resident[session.name] = of_tenant.resident[session.name] = session
            of_tenant.num_blocks += len(session.blocks)
        self._tally(session, 1)
        self._expiries.push(session.expires_at, session, len(self._sessions))
        gone = [] if former is None else [former]
        limits = limits_of(self.limits.tenants, session.tenant)
        while limits.max_blocks is not None and self.num_blocks(session.tenant) > limits.max_blocks:
            gone.append(self._drop(next(iter(self._tenants[session.tenant].resident.values()))))
        account = self._account(session)
        while limits.max_sessions is not None and self._accounts.count(account) > limits.max_sessions:
            gone.append(self._drop(self._first_to_go(account)))
        while len(self._sessions) > self.limits.max_sessions:
            gone.append(self._drop(self._first_to_go(self._accounts.leader())))
        return gone

    def remove(self, tenant: str, session_id: str) -> KVSession | None:
        session = self._sessions.get((tenant, session_id))
        return None if session is None else self._drop(session)

    def expire(self, now: float) -> list[KVSession]:
        return [self._drop(event.subject) for event in self._expiries.pop_due(now)]

    def oldest_resident(self) -> KVSession | None:
        return next(iter(self._resident.values()), None)

    def give_up_blocks(self, session: KVSession, num_kept: int = 0) -> tuple[int, ...]:
        given = session.blocks[num_kept:]
        self._take_blocks(session, len(given))
        session.blocks = session.blocks[:num_kept]
        return given

    def check_invariants(self) -> None:
        resident = {name: session for name, session in self._sessions.items() if session.blocks}
        require(list(resident) == list(self._resident), "sessions with blocks are listed wrongly")
        require({tenant for tenant, _ in self._sessions} == self._tenants.keys(), "tenants are listed wrongly")
        for tenant, of_tenant in self._tenants.items():
            for actual, names in ((of_tenant.sessions, self._sessions), (of_tenant.resident, resident)):
                own = [name for name in names if name[0] == tenant]
                require(own == list(actual), f"sessions of tenant {tenant!r} are listed wrongly")
            count = sum(len(session.blocks) for session in of_tenant.sessions.values())
            require(count == of_tenant.num_blocks, f"blocks of tenant {tenant!r} are miscounted")
            tally = self._members[account_of(self.limits.tenants, tenant)]
            require(tally.count(tenant) == len(of_tenant.sessions), f"sessions of {tenant!r} are miscounted")
        accounts = Counter(self._account(session) for session in self._sessions.values())
        require(accounts.keys() == self._members.keys(), "accounts are listed wrongly")
        for account, count in accounts.items():
            require(self._accounts.count(account) == count, f"sessions of account {account!r} are miscounted")
        waiting = set(map(id, self._expiries))
        require(all(id(session) in waiting for session in self._sessions.values()), "a session never expires")
        require(len(self._sessions) <= self.limits.max_sessions, "there are too many sessions")

    def _account(self, session: KVSession) -> str:
        return account_of(self.limits.tenants, session.tenant)

    def _first_to_go(self, account: str) -> KVSession:
        return next(iter(self._tenants[self._members[account].leader()].sessions.values()))

    def _drop(self, session: KVSession) -> KVSession:
        del self._sessions[session.name]
        of_tenant = self._tenants[session.tenant]
        self._take_blocks(session, len(session.blocks))
        del of_tenant.sessions[session.name]
        if not of_tenant.sessions:
            del self._tenants[session.tenant]
        self._tally(session, -1)
        return session

    def _tally(self, session: KVSession, change: int) -> None:
        account = self._account(session)
        self._accounts.add(account, change)
        self._members.setdefault(account, SessionTally()).add(session.tenant, change)
        if not self._accounts.count(account):
            del self._members[account]

    def _take_blocks(self, session: KVSession, num_blocks: int) -> None:
        of_tenant = self._tenants[session.tenant]
        of_tenant.num_blocks -= num_blocks
        if num_blocks == len(session.blocks):
            self._resident.pop(session.name, None)
            of_tenant.resident.pop(session.name, None)
