"""SessionStore: a state machine against a plain list of sessions, and examples."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.kvcache.invariants import check_sessions
from tidewheel.errors import InternalError
from tidewheel.kvcache.block_pool import BlockPool
from tidewheel.kvcache.prefix import KVSession
from tidewheel.kvcache.sessions import SessionLimits, SessionStore
from tidewheel.kvcache.transfers import TransferQueue
from tidewheel.stats import EngineStats
from tidewheel.tenants import TenantLimits, account_of, limits_of

TENANTS = ("", "acme", "initech")
IDS = ("one", "two", "three", "four")


def session(tenant: str, session_id: str, num_blocks: int = 1, expires_at: float = 10.0) -> KVSession:
    return KVSession(tenant, session_id, b"", (), b"", b"", tuple(range(num_blocks)), expires_at)


class RecordingPool(BlockPool):
    """Pool that takes any blocks, and remembers the blocks of the last release."""

    released: tuple[int, ...] = ()

    def release(self, block_ids: Sequence[int]) -> None:
        self.released = tuple(block_ids)


class RecordingStore(SessionStore):
    """Store that remembers the sessions it drops."""

    def __init__(self, limits: SessionLimits) -> None:
        self.pool, host = RecordingPool(0), BlockPool(0)
        super().__init__(self.pool, host, TransferQueue(self.pool, host, EngineStats()), limits, 4)
        self.dropped: list[KVSession] = []

    def _drop(self, session: KVSession) -> None:
        blocks = session.blocks
        super()._drop(session)
        assert self.pool.released == blocks[::-1]
        self.dropped.append(session)

    def taken(self) -> list[KVSession]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def add(self, session: KVSession) -> list[KVSession]:
        """Put a session, and return the dropped sessions."""
        self.put(session)
        return self.taken()


def test_what_goes_first_is_what_was_used_longest_ago() -> None:
    table = RecordingStore(SessionLimits(max_sessions=2))
    one, two, three = (session("", session_id) for session_id in IDS[:3])
    assert table.add(one) == table.add(two) == []
    assert table.oldest_resident() is one
    newer_one = session("", "one")
    assert table.add(newer_one) == [one]  # used again
    assert table.oldest_resident() is two
    assert table.add(three) == [two]
    assert (table.get("", "one"), table.get("", "two")) == (newer_one, None)


def test_a_tenant_over_its_quota_pays_with_its_own_sessions() -> None:
    table = RecordingStore(SessionLimits(tenants={"acme": TenantLimits(max_blocks=4)}))
    other = session("initech", "one", 100)
    mine = [session("acme", session_id, 2) for session_id in IDS[:3]]
    assert [table.add(each) for each in (other, *mine)] == [[], [], [], [mine[0]]]
    assert (table.num_blocks("acme"), table.num_blocks("initech")) == (4, 100)


def test_one_session_may_take_what_the_tighter_quota_allows() -> None:
    table = RecordingStore(SessionLimits(max_session_blocks=5, tenants={"acme": TenantLimits(max_blocks=3)}))
    assert (table.most_blocks("acme", 9), table.most_blocks("", 9), table.most_blocks("", 4)) == (3, 5, 4)
    assert RecordingStore(SessionLimits()).most_blocks("", 9) == 9


def filled(limits: SessionLimits, *tenants: str) -> RecordingStore:
    """One session after the other, each of the tenant that is named."""
    table = RecordingStore(limits)
    for number, tenant in enumerate(tenants):
        table.add(session(tenant, str(number)))
    return table


def kept(table: RecordingStore, tenant: str, count: int) -> list[int]:
    return [number for number in range(count) if table.get(tenant, str(number)) is not None]


def test_tiny_sessions_of_one_tenant_push_out_its_own_and_no_others() -> None:
    tenants = ["acme", "acme", "acme", "", *["crowd"] * 5000]
    table = filled(SessionLimits(), *tenants)
    assert len(table) == 4096
    assert kept(table, "acme", 3) == [0, 1, 2] and kept(table, "", 4) == [3]
    assert kept(table, "crowd", 5004)[:2] == [5004 - 4092, 5004 - 4091]
    check_sessions(table)


def test_a_crowd_of_invented_names_counts_as_one_tenant_against_those_with_an_entry() -> None:
    limits = SessionLimits(max_sessions=10, tenants={"acme": TenantLimits()})
    table = filled(limits, *["acme"] * 4, *(f"name-{number}" for number in range(100)))
    assert kept(table, "acme", 4) == [0, 1, 2, 3]


def test_a_tenant_over_its_number_of_sessions_loses_the_least_recently_used() -> None:
    limits = SessionLimits(tenants={"acme": TenantLimits(max_sessions=2), "*": TenantLimits(max_sessions=3)})
    table = filled(limits, "acme", "other", "acme", "acme", "third")
    assert kept(table, "acme", 5) == [2, 3]
    assert (kept(table, "other", 5), kept(table, "third", 5)) == ([1], [4])
    table.add(session("", "5"))
    table.add(session("", "6"))  # unknown tenants share three: the one that has two gives one up
    assert (kept(table, "", 7), kept(table, "other", 7), kept(table, "third", 7)) == ([6], [1], [4])


def test_each_unknown_tenant_may_have_sessions_of_its_own() -> None:
    table = filled(SessionLimits(tenants={"*": TenantLimits(max_sessions=1, each=True)}), "a", "b", "a", "c")
    assert [kept(table, tenant, 4) for tenant in "abc"] == [[2], [1], [3]]


def test_of_tenants_with_as_many_sessions_the_one_idle_for_longest_gives_way() -> None:
    table = filled(SessionLimits(max_sessions=3), "a", "b", "c")
    table.add(session("a", "0"))  # used again
    assert [gone.name for gone in table.add(session("d", "3"))] == [("b", "1")]


def test_a_session_more_than_fit_takes_as_little_time_among_many_tenants() -> None:
    limits = SessionLimits(tenants={"*": TenantLimits(each=True)})
    table = filled(limits, *map(str, range(4096)))
    calls: list[str] = []
    sys.setprofile(lambda _, event, __: calls.append(event))
    try:
        dropped = table.add(session("new", "one"))
    finally:
        sys.setprofile(None)
    assert [gone.name for gone in dropped] == [("0", "0")]
    assert len(calls) < 500


def test_a_session_that_is_used_all_the_time_leaves_no_trail() -> None:
    table = RecordingStore(SessionLimits())
    for moment in range(1000):
        table.add(session("", "one", expires_at=1000.0 + moment))
    assert len(table._expiries._heap) < 100
    table.taken()
    table.expire(1500.0)
    assert table.taken() == []
    table.expire(2000.0)
    assert len(table.taken()) == 1


def test_check_invariants_sees_damage() -> None:
    table = RecordingStore(SessionLimits())
    table.add(session("acme", "one", 2))
    of_tenant = table._tenants["acme"]
    table._num_blocks["acme"] = 3
    with pytest.raises(InternalError, match="blocks of tenant 'acme' are miscounted"):
        check_sessions(table)
    table._num_blocks["acme"] = 2
    of_tenant["two"] = of_tenant["one"]
    with pytest.raises(InternalError, match="sessions of 'acme' are listed wrongly"):
        check_sessions(table)


class SessionMachine(RuleBasedStateMachine):
    """The model is a list of sessions, the one used last at its end."""

    @initialize(
        max_sessions=st.integers(1, 6), max_tenant_blocks=st.one_of(st.none(), st.integers(3, 8)),
        max_own=st.one_of(st.none(), st.integers(1, 3)), max_shared=st.one_of(st.none(), st.integers(1, 4)),
        each=st.booleans(),
    )  # fmt: skip
    def start(
        self,
        max_sessions: int,
        max_tenant_blocks: int | None,
        max_own: int | None,
        max_shared: int | None,
        each: bool,
    ) -> None:
        self.max_sessions, self.max_tenant_blocks = max_sessions, max_tenant_blocks
        self.tenants = {
            "acme": TenantLimits(max_blocks=max_tenant_blocks, max_sessions=max_own),
            "*": TenantLimits(max_blocks=max_tenant_blocks, max_sessions=max_shared, each=each),
        }
        self.table = RecordingStore(SessionLimits(max_sessions, None, self.tenants))
        self.sessions: list[KVSession] = []
        # Tenants and accounts, the one whose sessions changed last at the end.
        self.changes: list[str] = []
        self.account_changes: list[str] = []
        self.now = 0.0

    def account(self, tenant: str) -> str:
        return account_of(self.tenants, tenant)

    def note(self, tenant: str) -> None:
        account = self.account(tenant)
        self.changes = [name for name in self.changes if name != tenant] + [tenant]
        self.account_changes = [name for name in self.account_changes if name != account] + [account]

    def drop(self, gone: KVSession) -> KVSession:
        self.sessions.remove(gone)
        self.note(gone.tenant)
        return gone

    def first_to_go(self, account: str) -> KVSession:
        """Of the tenant of the account with most sessions, the one used longest ago."""
        tenants = [name for name in self.changes if self.account(name) == account]
        return self.of(max(tenants, key=lambda tenant: len(self.of(tenant))))[0]

    def num_of_account(self, account: str) -> int:
        return sum(self.account(each.tenant) == account for each in self.sessions)

    def of(self, tenant: str) -> list[KVSession]:
        return [each for each in self.sessions if each.tenant == tenant]

    def num_blocks(self, tenant: str) -> int:
        return sum(len(each.blocks) for each in self.of(tenant))

    @rule(
        tenant=st.sampled_from(TENANTS), session_id=st.sampled_from(IDS), num_blocks=st.integers(0, 3),
        seconds=st.sampled_from([1.0, 5.0, 20.0]),
    )  # fmt: skip
    def put(self, tenant: str, session_id: str, num_blocks: int, seconds: float) -> None:
        new = session(tenant, session_id, num_blocks, self.now + seconds)
        expected = [self.drop(each) for each in self.sessions if each.name == new.name]
        self.sessions.append(new)
        self.note(tenant)
        while self.max_tenant_blocks is not None and self.num_blocks(tenant) > self.max_tenant_blocks:
            expected.append(self.drop(next(each for each in self.of(tenant) if each.blocks)))
        account, limit = self.account(tenant), limits_of(self.tenants, tenant).max_sessions
        while limit is not None and self.num_of_account(account) > limit:
            expected.append(self.drop(self.first_to_go(account)))
        while len(self.sessions) > self.max_sessions:
            most = max(self.account_changes, key=self.num_of_account)
            expected.append(self.drop(self.first_to_go(most)))
        assert self.table.add(new) == expected

    @rule(tenant=st.sampled_from(TENANTS), session_id=st.sampled_from(IDS))
    def remove(self, tenant: str, session_id: str) -> None:
        known = next((each for each in self.sessions if each.name == (tenant, session_id)), None)
        assert self.table.get(tenant, session_id) is known
        assert self.table.remove(tenant, session_id) == (known is not None)
        assert self.table.taken() == ([] if known is None else [known])
        if known is not None:
            self.drop(known)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        gone = self.table.taken()
        assert set(gone) == {each for each in self.sessions if each.expires_at <= self.now}
        for each in gone:
            self.drop(each)

    @rule(num_kept=st.integers(0, 2))
    def give_up(self, num_kept: int) -> None:
        oldest = self.table.oldest_resident()
        assert oldest is next((each for each in self.sessions if each.blocks), None)
        if oldest is not None:
            before = oldest.blocks
            self.table.give_up_blocks(oldest, num_kept)
            assert (self.table.pool.released, oldest.blocks) == (before[num_kept:][::-1], before[:num_kept])

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "table"):
            return
        check_sessions(self.table)
        assert len(self.table) == len(self.sessions)
        for tenant in TENANTS:
            assert self.table.num_blocks(tenant) == self.num_blocks(tenant)


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.slow
class TestSessionMachineLong(SessionMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=80, deadline=None)
