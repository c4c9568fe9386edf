from __future__ import annotations

from collections import OrderedDict
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


class SessionTable:
    """Sessions by name, and by account and tenant in order of use.

    Above `max_sessions`, drop the least recently used session of the tenant with most sessions, in the account with
    most. Of equal accounts or tenants, take the one that changed longest ago.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: dict[SessionName, KVSession] = {}
        self._resident: OrderedDict[SessionName, KVSession] = OrderedDict()  # with blocks, least recently used first
        self._accounts: dict[str, dict[str, TenantSessions]] = {}  # accounts and tenants: longest unchanged first
        self._expiries = EventHeap[KVSession](lambda event: self.get(*event.subject.name) is event.subject)

    def reconfigure(self, limits: SessionLimits) -> None:
        sessions = list(self._sessions.values())
        self.limits = limits
        for index in (self._sessions, self._resident, self._accounts):
            index.clear()
        for session in sessions:
            self.put(session)

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, session_id: str) -> KVSession | None:
        return self._sessions.get((tenant, session_id))

    def num_blocks(self, tenant: str) -> int:
        of_tenant = self._tenants(tenant).get(tenant)
        return 0 if of_tenant is None else of_tenant.num_blocks

    def most_blocks(self, tenant: str, num_blocks: int) -> int:
        """Limit `num_blocks` to what one session of the tenant may keep."""
        limits = [self.limits.max_session_blocks, limits_of(self.limits.tenants, tenant).max_blocks]
        return min([num_blocks, *(limit for limit in limits if limit is not None)])

    def put(self, session: KVSession) -> None:
        """Add a session; drop an older one of that name, and sessions beyond the limits."""
        self.remove(*session.name)
        self._sessions[session.name] = session
        of_tenant = self._changed(session.tenant)
        of_tenant[session.session_id] = session
        of_tenant.num_blocks += len(session.blocks)
        if session.blocks:
            self._resident[session.name] = session
        self._expiries.push(session.expires_at, session, len(self._sessions))
        limits = limits_of(self.limits.tenants, session.tenant)
        while limits.max_blocks is not None and self.num_blocks(session.tenant) > limits.max_blocks:
            self._drop(next(one for one in of_tenant.values() if one.blocks))
        if limits.max_sessions is not None:
            while _num_sessions(tenants := self._tenants(session.tenant)) > limits.max_sessions:
                self._drop(_first_to_go(tenants))
        while len(self._sessions) > self.limits.max_sessions:
            self._drop(_first_to_go(max(self._accounts.values(), key=_num_sessions)))

    def remove(self, tenant: str, session_id: str) -> bool:
        """Drop a session; return False if unknown."""
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
        self._tenants(session.tenant)[session.tenant].num_blocks -= len(given)
        session.blocks = session.blocks[:num_kept]
        if not session.blocks:
            self._resident.pop(session.name, None)
        return given

    def check_invariants(self) -> None:
        resident = [name for name, session in self._sessions.items() if session.blocks]
        require(resident == list(self._resident), "sessions with blocks are listed wrongly")
        listed = 0
        for account, tenants in self._accounts.items():
            for tenant, of_tenant in tenants.items():
                require(account_of(self.limits.tenants, tenant) == account, f"tenant {tenant!r} is in {account!r}")
                own = {name: session for (of, name), session in self._sessions.items() if of == tenant}
                require(list(own) == list(of_tenant) and bool(own), f"sessions of {tenant!r} are listed wrongly")
                count = sum(len(session.blocks) for session in own.values())
                require(count == of_tenant.num_blocks, f"blocks of tenant {tenant!r} are miscounted")
                listed += len(own)
        require(listed == len(self._sessions), "a session belongs to no tenant")
        waiting = set(map(id, self._expiries))
        require(all(id(session) in waiting for session in self._sessions.values()), "a session never expires")
        require(len(self._sessions) <= self.limits.max_sessions, "there are too many sessions")

    def _release(self, session: KVSession) -> None:
        """Free a dropped session's blocks. Subclasses override this."""

    def _drop(self, session: KVSession) -> None:
        tenant = session.tenant
        del self._sessions[session.name]
        self._resident.pop(session.name, None)
        of_tenant = self._changed(tenant)
        del of_tenant[session.session_id]
        of_tenant.num_blocks -= len(session.blocks)
        if not of_tenant:
            tenants = self._tenants(tenant)
            del tenants[tenant]
            if not tenants:
                del self._accounts[account_of(self.limits.tenants, tenant)]
        self._release(session)

    def _tenants(self, tenant: str) -> dict[str, TenantSessions]:
        return self._accounts.get(account_of(self.limits.tenants, tenant), {})

    def _changed(self, tenant: str) -> TenantSessions:
        account = account_of(self.limits.tenants, tenant)
        tenants = self._accounts[account] = self._accounts.pop(account, {})
        tenants[tenant] = of_tenant = tenants.pop(tenant, None) or TenantSessions()
        return of_tenant


def _num_sessions(tenants: Mapping[str, TenantSessions]) -> int:
    return sum(map(len, tenants.values()))


def _first_to_go(tenants: Mapping[str, TenantSessions]) -> KVSession:
    return next(iter(max(tenants.values(), key=len).values()))
