from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
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


class SessionTable:
    """Sessions by name, and by tenant in order of use.

    Above `max_sessions`, drop the least recently used session of the tenant with most, in the account with most.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: dict[SessionName, KVSession] = {}
        self._resident: OrderedDict[SessionName, KVSession] = OrderedDict()  # with blocks, least recently used first
        self._tenants: dict[str, TenantSessions] = {}
        self._accounts = Tally()
        self._members: defaultdict[str, Tally] = defaultdict(Tally)  # tenants by account
        self._expiries = EventHeap[KVSession](lambda event: self.get(*event.subject.name) is event.subject)

    def reconfigure(self, limits: SessionLimits) -> None:
        sessions = self._sessions.values()
        SessionTable.__init__(self, limits)
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

    def expire(self, now: float) -> None:
        for event in self._expiries.pop_due(now):
            self._drop(event.subject)

    def oldest_resident(self) -> KVSession | None:
        return next(iter(self._resident.values()), None)

    def give_up_blocks(self, session: KVSession, num_kept: int = 0) -> tuple[int, ...]:
        given = session.blocks[num_kept:]
        self._tenants[session.tenant].num_blocks -= len(given)
        session.blocks = session.blocks[:num_kept]
        if not session.blocks:
            self._resident.pop(session.name, None)
        return given

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

    def _release(self, session: KVSession) -> None:
        """Free a dropped session's blocks. Subclasses override this."""

    def _drop(self, session: KVSession) -> None:
        del self._sessions[session.name]
        self._resident.pop(session.name, None)
        of_tenant = self._tenants[session.tenant]
        del of_tenant[session.session_id]
        of_tenant.num_blocks -= len(session.blocks)
        if not of_tenant:
            del self._tenants[session.tenant]
        self._count(session.tenant, -1)
        self._release(session)

    def _count(self, tenant: str, change: int) -> str:
        account = account_of(self.limits.tenants, tenant)
        self._accounts.add(account, change)
        self._members[account].add(tenant, change)
        if not self._accounts[account]:
            del self._members[account]
        return account

    def _first_to_go(self, account: str) -> KVSession:
        return next(iter(self._tenants[self._members[account].leader()].values()))
