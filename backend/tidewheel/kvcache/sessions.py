"""Which sessions there are, in which order they go, and what each of them may keep."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tidewheel.kvcache.invariants import require

SessionName = tuple[str, str]  # tenant, session_id


def no_limit(_tenant: str) -> None:
    return None


class SessionLimits(NamedTuple):
    """Blocks are those of the pool; what lies in the host tier has that tier's limit. None: no limit."""

    max_sessions: int = 4096
    max_session_blocks: int | None = None
    max_tenant_blocks: Callable[[str], int | None] = no_limit


@dataclass(eq=False, slots=True)
class Session:
    """The content that one session keeps: full blocks by their digests, then the tokens of the last, partial one."""

    tenant: str
    session_id: str
    parent: bytes  # digest that the tail follows: the last of `keys`, or the root
    keys: tuple[bytes, ...]
    tail_tokens: bytes  # int32 little endian; empty: no tail
    tail_key: bytes
    blocks: tuple[int, ...]  # in the pool, the tail's last; empty once they were given up
    expires_at: float

    @property
    def name(self) -> SessionName:
        return self.tenant, self.session_id

    @property
    def tail_block(self) -> int:
        """-1: none in the pool."""
        return self.blocks[-1] if self.tail_tokens and self.blocks else -1


class SessionTable:
    """Sessions by name, in the order of their last use, and how many blocks each tenant's take.

    Knows nothing of the pool: whoever is handed a session back by `put`, `remove` or `expire` releases its blocks.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self._sessions: OrderedDict[SessionName, Session] = OrderedDict()  # least recently used first
        self._resident: OrderedDict[SessionName, Session] = OrderedDict()  # those with blocks, in the same order
        self._tenants: dict[str, OrderedDict[SessionName, Session]] = {}  # `_resident` by tenant
        self._tenant_blocks: dict[str, int] = {}
        self._expiries: list[tuple[float, int, Session]] = []  # heap; has also sessions that are gone
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, tenant: str, session_id: str) -> Session | None:
        return self._sessions.get((tenant, session_id))

    def num_blocks(self, tenant: str) -> int:
        """Blocks in the pool that the tenant's sessions keep; one that two of them share counts twice."""
        return self._tenant_blocks.get(tenant, 0)

    def max_blocks(self, tenant: str) -> int | None:
        """Blocks that one session of this tenant may keep."""
        limits = [self.limits.max_session_blocks, self.limits.max_tenant_blocks(tenant)]
        return min((limit for limit in limits if limit is not None), default=None)

    def put(self, session: Session) -> list[Session]:
        """The session as it was used last. Returns those that go for it: the one that had its name, then, the one
        whose last use is longest ago first, as many as are over the tenant's quota and over `max_sessions`."""
        former = self.remove(*session.name)
        self._sessions[session.name] = session
        self._count_in(session)
        self._num_put += 1
        heapq.heappush(self._expiries, (session.expires_at, self._num_put, session))
        self._compact_expiries()
        gone = [] if former is None else [former]
        max_blocks = self.limits.max_tenant_blocks(session.tenant)
        while max_blocks is not None and self.num_blocks(session.tenant) > max_blocks:
            gone.append(self._drop(next(iter(self._tenants[session.tenant].values()))))
        while len(self._sessions) > self.limits.max_sessions:
            gone.append(self._drop(next(iter(self._sessions.values()))))
        return gone

    def remove(self, tenant: str, session_id: str) -> Session | None:
        session = self._sessions.get((tenant, session_id))
        return None if session is None else self._drop(session)

    def expire(self, now: float) -> list[Session]:
        """Sessions whose time is over."""
        gone = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, session = heapq.heappop(self._expiries)
            if self._sessions.get(session.name) is session:
                gone.append(self._drop(session))
        return gone

    def oldest_resident(self) -> Session | None:
        """Of those with blocks in the pool, the one whose last use is longest ago."""
        return next(iter(self._resident.values()), None)

    def give_up_blocks(self, session: Session, num_kept: int = 0) -> tuple[int, ...]:
        """All but the first `num_kept` blocks leave the session, which goes on without them; those blocks."""
        kept, given = session.blocks[:num_kept], session.blocks[num_kept:]
        self._count_out(session, len(given))
        session.blocks = kept
        if not kept:
            self._forget_resident(session)
        return given

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks of sessions)."""
        resident = [name for name, session in self._sessions.items() if session.blocks]
        require(resident == list(self._resident), "sessions with blocks are listed wrongly")
        for tenant in {tenant for tenant, _ in resident} | self._tenants.keys() | self._tenant_blocks.keys():
            names = [name for name in resident if name[0] == tenant]
            require(names == list(self._tenants.get(tenant, ())), f"sessions of tenant {tenant!r} are listed wrongly")
            count = sum(len(self._sessions[name].blocks) for name in names)
            require(count == self.num_blocks(tenant), f"blocks of tenant {tenant!r} are miscounted")
        waiting = {id(session) for _, _, session in self._expiries}
        require(all(id(session) in waiting for session in self._sessions.values()), "a session never expires")
        require(len(self._sessions) <= self.limits.max_sessions, "there are too many sessions")

    def _drop(self, session: Session) -> Session:
        del self._sessions[session.name]
        if session.blocks:
            self._count_out(session, len(session.blocks))
            self._forget_resident(session)
        return session

    def _count_in(self, session: Session) -> None:
        if session.blocks:
            self._resident[session.name] = session
            self._tenants.setdefault(session.tenant, OrderedDict())[session.name] = session
            self._tenant_blocks[session.tenant] = self.num_blocks(session.tenant) + len(session.blocks)

    def _count_out(self, session: Session, num_blocks: int) -> None:
        left = self.num_blocks(session.tenant) - num_blocks
        if left:
            self._tenant_blocks[session.tenant] = left
        else:
            self._tenant_blocks.pop(session.tenant, None)

    def _forget_resident(self, session: Session) -> None:
        del self._resident[session.name]
        of_tenant = self._tenants[session.tenant]
        del of_tenant[session.name]
        if not of_tenant:
            del self._tenants[session.tenant]

    def _compact_expiries(self) -> None:
        """A session in steady use leaves an entry each time; most of them stand for what is gone."""
        if len(self._expiries) > 2 * len(self._sessions) + 64:
            live = [entry for entry in self._expiries if self._sessions.get(entry[2].name) is entry[2]]
            heapq.heapify(live)
            self._expiries = live
