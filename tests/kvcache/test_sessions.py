"""SessionTable: a state machine against a plain list of sessions, and examples."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidewheel.errors import InternalError
from tidewheel.kvcache.sessions import Session, SessionLimits, SessionTable

TENANTS = ("", "acme", "initech")
IDS = ("one", "two", "three", "four")


def session(tenant: str, session_id: str, num_blocks: int = 1, expires_at: float = 10.0) -> Session:
    return Session(tenant, session_id, b"", (), b"", b"", tuple(range(num_blocks)), expires_at)


def test_what_goes_first_is_what_was_used_longest_ago() -> None:
    table = SessionTable(SessionLimits(max_sessions=2))
    one, two, three = (session("", session_id) for session_id in IDS[:3])
    assert table.put(one) == table.put(two) == []
    assert table.oldest_resident() is one
    newer_one = session("", "one")
    assert table.put(newer_one) == [one]  # used again
    assert table.oldest_resident() is two
    assert table.put(three) == [two]
    assert (table.get("", "one"), table.get("", "two")) == (newer_one, None)


def test_a_tenant_over_its_quota_pays_with_its_own_sessions() -> None:
    quotas = {"acme": 4}
    table = SessionTable(SessionLimits(max_tenant_blocks=quotas.get))
    other = session("initech", "one", 100)
    mine = [session("acme", session_id, 2) for session_id in IDS[:3]]
    assert [table.put(each) for each in (other, *mine)] == [[], [], [], [mine[0]]]
    assert (table.num_blocks("acme"), table.num_blocks("initech")) == (4, 100)


def test_one_session_may_take_what_the_tighter_quota_allows() -> None:
    table = SessionTable(SessionLimits(max_session_blocks=5, max_tenant_blocks={"acme": 3}.get))
    assert (table.max_blocks("acme"), table.max_blocks("")) == (3, 5)
    assert SessionTable(SessionLimits()).max_blocks("") is None


def test_a_session_that_is_used_all_the_time_leaves_no_trail() -> None:
    table = SessionTable(SessionLimits())
    for moment in range(1000):
        table.put(session("", "one", expires_at=1000.0 + moment))
    assert len(table._expiries) < 100
    assert table.expire(1500.0) == []
    assert len(table.expire(2000.0)) == 1


def test_check_invariants_sees_damage() -> None:
    table = SessionTable(SessionLimits())
    table.put(session("acme", "one", 2))
    table._tenant_blocks["acme"] = 3
    with pytest.raises(InternalError, match="blocks of tenant 'acme' are miscounted"):
        table.check_invariants()


class SessionMachine(RuleBasedStateMachine):
    """The model is a list of sessions, the one used last at its end."""

    @initialize(max_sessions=st.integers(1, 6), max_tenant_blocks=st.one_of(st.none(), st.integers(3, 8)))
    def start(self, max_sessions: int, max_tenant_blocks: int | None) -> None:
        self.max_sessions, self.max_tenant_blocks = max_sessions, max_tenant_blocks
        self.table = SessionTable(SessionLimits(max_sessions, None, lambda tenant: max_tenant_blocks))
        self.sessions: list[Session] = []
        self.now = 0.0

    def of(self, tenant: str) -> list[Session]:
        return [each for each in self.sessions if each.tenant == tenant]

    def num_blocks(self, tenant: str) -> int:
        return sum(len(each.blocks) for each in self.of(tenant))

    @rule(
        tenant=st.sampled_from(TENANTS), session_id=st.sampled_from(IDS), num_blocks=st.integers(0, 3),
        seconds=st.sampled_from([1.0, 5.0, 20.0]),
    )  # fmt: skip
    def put(self, tenant: str, session_id: str, num_blocks: int, seconds: float) -> None:
        new = session(tenant, session_id, num_blocks, self.now + seconds)
        expected = [each for each in self.sessions if each.name == new.name]
        self.sessions = [each for each in self.sessions if each.name != new.name] + [new]
        while self.max_tenant_blocks is not None and self.num_blocks(tenant) > self.max_tenant_blocks:
            expected.append(next(each for each in self.of(tenant) if each.blocks))
            self.sessions.remove(expected[-1])
        while len(self.sessions) > self.max_sessions:
            expected.append(self.sessions.pop(0))
        assert self.table.put(new) == expected

    @rule(tenant=st.sampled_from(TENANTS), session_id=st.sampled_from(IDS))
    def remove(self, tenant: str, session_id: str) -> None:
        known = next((each for each in self.sessions if each.name == (tenant, session_id)), None)
        assert self.table.get(tenant, session_id) is known
        assert self.table.remove(tenant, session_id) is known
        self.sessions = [each for each in self.sessions if each is not known]

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        gone = self.table.expire(self.now)
        assert set(gone) == {each for each in self.sessions if each.expires_at <= self.now}
        self.sessions = [each for each in self.sessions if each.expires_at > self.now]

    @rule(num_kept=st.integers(0, 2))
    def give_up(self, num_kept: int) -> None:
        oldest = self.table.oldest_resident()
        assert oldest is next((each for each in self.sessions if each.blocks), None)
        if oldest is not None:
            before = oldest.blocks
            assert self.table.give_up_blocks(oldest, num_kept) == before[num_kept:]
            assert oldest.blocks == before[:num_kept]

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        assert len(self.table) == len(self.sessions)
        for tenant in TENANTS:
            assert self.table.num_blocks(tenant) == self.num_blocks(tenant)


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.slow
class TestSessionMachineLong(SessionMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=80, deadline=None)
