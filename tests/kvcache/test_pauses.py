"""Sessions whose tools run: how long these are expected to take, who gives way, and who comes back in time."""

from __future__ import annotations

import pytest

from kvcache.test_manager_sessions import Turns, make_manager, turn
from support.kvcache.invariants import check_cache
from support.kvcache.kv_machine import kv_request
from tidewheel.kvcache import pauses
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.pauses import Duration, ToolDurations
from tidewheel.tenants import TenantLimits


def learned(kv: KVCacheManager, **seconds: float) -> None:
    """Let each tool run some times, for as long as given."""
    for tool, duration in seconds.items():
        for _ in range(40):
            kv.sessions.tools.begin("", tool, [tool], 0.0)
            kv.sessions.tools.end("", tool, duration)


def pausing(turns: Turns, sessions: dict[str, str]) -> None:
    """Run a turn of two blocks for each session, which ends with a call of a tool."""
    for number, (name, tool) in enumerate(sessions.items()):
        turns.run(kv_request(name, [100 * number + token for token in range(8)], session_id=name))
        if tool:
            turns.kv.sessions.pause("", name, [tool], turns.now)


def resident(kv: KVCacheManager) -> set[str]:
    return {session.session_id for session in kv.sessions._sessions.values() if session.blocks}


def test_a_tool_is_expected_to_last_as_it_did() -> None:
    tools = ToolDurations()
    for seconds in (1.0, 4.0, 4.0, 16.0):
        tools.begin("a", "s", ["build"], 100.0)
        tools.end("a", "s", 100.0 + seconds)
    expected = tools.begin("a", "s", ["build"], 0.0)
    assert expected.duration.median == pytest.approx(4.0)
    assert expected.seconds_left(0.0) == pytest.approx(4.0)
    assert expected.seconds_left(400.0) > 100.0  # a call that lasts long will last longer


def test_an_unseen_tool_lasts_as_the_tenant_s_others_and_the_slowest_of_several_counts() -> None:
    tools = ToolDurations()
    for tool, seconds in (("read", 0.1), ("build", 10.0)):
        tools.begin("a", "s", [tool], 0.0)
        tools.end("a", "s", seconds)
    assert tools.begin("a", "s", ["new"], 0.0).duration.median == pytest.approx(1.0)
    assert tools.begin("a", "s", ["read", "build"], 0.0).duration.median == pytest.approx(10.0)
    assert tools.begin("b", "s", ["build"], 0.0).duration == Duration()


def test_recent_durations_count_more() -> None:
    duration = Duration()
    for seconds in [1.0] * 200 + [8.0] * 100:
        duration = duration.with_seen(seconds)
    assert 6.0 < duration.median < 8.0


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "MAX_TOOLS", 3)
    monkeypatch.setattr(pauses, "MAX_RUNNING", 2)
    tools = ToolDurations()
    for number in range(9):
        tools.begin("", f"s{number}", [f"t{number}"], 0.0)
    for number in range(9):
        tools.end("", f"s{number}", 5.0)
    assert len(tools._durations) <= 3 and not tools._running


def test_the_session_expected_last_gives_way_first() -> None:
    turns = Turns(make_manager(8))
    learned(turns.kv, read=0.1, build=60.0)
    pausing(turns, {"a": "read", "b": "build", "c": "read"})
    assert turns.kv.allocate(1, 16)  # two blocks are free
    assert resident(turns.kv) == {"a", "c"}


def test_sessions_without_a_tool_give_way_before_others() -> None:
    turns = Turns(make_manager(8))
    pausing(turns, {"a": "build", "b": "", "c": ""})
    assert turns.kv.allocate(1, 16)
    assert resident(turns.kv) == {"a", "c"}


def test_a_turn_that_has_arrived_keeps_its_blocks() -> None:
    turns = Turns(make_manager(8))
    learned(turns.kv, read=0.1, build=60.0)
    pausing(turns, {"a": "build", "b": "read"})
    turns.kv.sessions.arrive("", "a", 1.0)
    turns.kv.sessions.now = 1.0
    assert turns.kv.allocate(1, 24)
    assert resident(turns.kv) == {"a"}


def test_a_session_comes_back_before_its_turn() -> None:
    turns = Turns(make_manager(6, num_host_blocks=8))
    learned(turns.kv, read=10.0)
    pausing(turns, {"a": "read"})
    kv = turns.kv
    assert kv.allocate(1, 24)
    turns.step()
    assert resident(kv) == set()
    kv.free(1)
    kv.sessions.now = 1.0
    turns.step()
    assert resident(kv) == set()  # too early
    kv.sessions.now = 9.5
    moved = kv.take_transfers(50)
    assert len(moved.swap_in_blocks) == 2 and resident(kv) == {"a"}
    assert kv.num_free_blocks == 4  # the others are on their way
    kv.transfers.done(50)
    assert kv.num_free_blocks == 6
    check_cache(kv)
    hit = kv.prefixes.find(kv_request("next", 12, session_id="a"))
    assert (len(hit.block_ids), hit.host_keys) == (2, ())


def push_out(turns: Turns) -> None:
    """Let a row take all 6 blocks of the pool for a step, so that sessions move to the host tier."""
    assert turns.kv.allocate(1, 24)
    turns.step()
    turns.kv.free(1)


def test_no_session_comes_back_to_blocks_that_rows_need() -> None:
    turns = Turns(make_manager(6, num_host_blocks=8))
    learned(turns.kv, read=10.0)
    pausing(turns, {"a": "read"})
    push_out(turns)
    turns.kv.sessions.now = 9.5
    assert not len(turns.kv.take_transfers(50, keep_free=5).swap_in_blocks)


def test_the_host_tier_lets_go_of_the_session_expected_last() -> None:
    turns = Turns(make_manager(6, num_host_blocks=4))
    learned(turns.kv, read=0.1, test=5.0, build=60.0)
    pausing(turns, {"a": "build", "b": "test", "c": "read"})
    for row, num_blocks in enumerate((2, 4)):
        assert turns.kv.allocate(row, 4 * num_blocks)
        turns.step()
    assert {name for _, name in turns.kv.sessions._sessions} == {"b", "c"}
    assert turns.kv.update_stats().num_free_host_blocks == 4
    check_cache(turns.kv)


def test_a_tenant_over_its_share_gives_way_however_short_its_tools_are() -> None:
    limits = {"big": TenantLimits(weight=1.0), "small": TenantLimits(weight=1.0)}
    turns = Turns(make_manager(8, tenants=limits))
    store = turns.kv.sessions
    for number, (tenant, tool) in enumerate([("big", "x"), ("big", "x"), ("small", "y")]):
        name = f"s{number}"
        turns.run(kv_request(name, [100 * number + token for token in range(8)], session_id=name, tenant=tenant))
        store.tools._durations[tenant, tool] = Duration(-3.0 if tenant == "big" else 5.0, 1.0, 9)
        store.pause(tenant, name, [tool], 0.0)
    assert turns.kv.allocate(1, 16)
    assert [session.tenant for session in store._sessions.values()] == ["big", "small"]


def test_forks_of_a_conversation_share_its_blocks() -> None:
    turns = Turns(make_manager(12))
    turns.run(turn(12))
    one, other = (kv_request(name, [*range(12), token], session_id=name) for name, token in (("x", 50), ("y", 60)))
    assert turns.enter(one, 0) == turns.enter(other, 1) == 12
    assert turns.kv.block_table(0)[:3] == turns.kv.block_table(1)[:3]
    turns.end(one, 0)
    turns.end(other, 1)
    assert turns.kv.update_stats().num_session_blocks == 5


def share(turns: Turns, tenants: str, tools: str = "") -> list[str]:
    """Run a session of two blocks for each tenant's letter, which waits for a tool if `tools` has an x there."""
    store = turns.kv.sessions
    for number, (tenant, tool) in enumerate(zip(tenants, tools, strict=True)):
        name = f"s{number}"
        turns.run(kv_request(name, [100 * number + token for token in range(8)], session_id=name, tenant=tenant))
        if tool == "x":
            store.pause(tenant, name, ["x"], 0.0)
    assert turns.kv.allocate(9, 16)
    check_cache(turns.kv)
    return [session.tenant for session in store._sessions.values()]


def test_calls_of_tools_are_no_way_to_more_than_a_share() -> None:
    """A tenant that says of all its sessions that tools run keeps no more than one that says nothing."""
    assert share(Turns(make_manager(8)), "aaab", "xxx-") == ["a", "b"]
    assert share(Turns(make_manager(8)), "abbb", "x---") == ["a", "b"]
    assert share(Turns(make_manager(8)), "aaaa", "xxx-") == ["a", "a"]
    heavy = {"a": TenantLimits(weight=4.0), "b": TenantLimits()}
    assert share(Turns(make_manager(8, tenants=heavy)), "aaab", "xxx-") == ["a", "a"]


def test_tenants_without_an_entry_share_one() -> None:
    limits = {"a": TenantLimits()}
    assert share(Turns(make_manager(8, tenants=limits)), "apqr", "-xxx").count("a") == 1
    assert not set(share(Turns(make_manager(8)), "apqr", "-xxx")) & {"a"}


def test_of_thousands_of_pauses_the_order_is_made_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that pause, arrive, or come back meanwhile are seen: blocks that count as free are there."""
    count = 300
    turns = Turns(make_manager(2 * count))
    learned(turns.kv, read=0.1, build=60.0)
    pausing(turns, {f"s{number}": "build" if number % 3 else "read" for number in range(count)})
    store = turns.kv.sessions
    made: list[float] = []
    rank = store._rank
    monkeypatch.setattr(store, "_rank", lambda *tier: (made.append(store.now), rank(*tier))[1])
    for row in range(50):
        assert turns.kv.allocate(row, 8)
        turns.kv.free(row)
        assert turns.kv.allocate(row, 16)
    check_cache(turns.kv)
    assert len(made) <= 2
    assert {int(name[1:]) % 3 for name in resident(turns.kv)} == {0, 1, 2}
    assert len([name for name in resident(turns.kv) if int(name[1:]) % 3 == 0]) == 100
    for name in list(resident(turns.kv)):  # all of whose turns arrive
        store.arrive("", name, 0.0)
    for row in range(50, 50 + turns.kv.num_free_blocks):
        assert turns.kv.allocate(row, 4)
    check_cache(turns.kv)
    assert resident(turns.kv) == set()


def test_a_closed_session_teaches_nothing() -> None:
    turns = Turns(make_manager(8))
    pausing(turns, {"a": "read"})
    turns.kv.sessions.close("", "a")
    turns.kv.sessions.arrive("", "a", 5000.0)
    assert turns.kv.sessions.tools.begin("", "a", ["read"], 5000.0).duration.num_seen == 0


def test_a_session_that_pauses_in_the_host_tier_comes_back() -> None:
    turns = Turns(make_manager(6, num_host_blocks=8))
    learned(turns.kv, read=10.0)
    pausing(turns, {"a": ""})
    push_out(turns)
    for _ in range(3):
        turns.kv.sessions.pause("", "a", ["read"], 0.0)
    turns.kv.sessions.now = 9.5
    turns.step()
    assert resident(turns.kv) == {"a"}
    check_cache(turns.kv)


def test_sessions_come_back_after_a_change_of_limits() -> None:
    turns = Turns(make_manager(6, num_host_blocks=8))
    learned(turns.kv, read=10.0)
    pausing(turns, {"a": "read"})
    push_out(turns)
    turns.kv.sessions.reconfigure(turns.kv.sessions.limits)
    turns.kv.sessions.now = 9.5
    turns.step()
    assert resident(turns.kv) == {"a"}
    check_cache(turns.kv)


@pytest.mark.parametrize("count", [60, 300])
def test_blocks_come_free_however_many_paused_sessions_are_in_the_host_tier(count: int) -> None:
    turns = Turns(make_manager(2 * count, num_host_blocks=4 * count))
    learned(turns.kv, read=0.1, build=60.0)
    pausing(turns, {f"s{number}": "build" if number % 3 else "read" for number in range(count)})
    for row in range(count):
        assert turns.kv.allocate(row, 8)
        turns.step()
    check_cache(turns.kv)
    assert resident(turns.kv) == set() and len(turns.kv.sessions) == count


def test_only_what_may_leave_a_tier_counts_for_its_order() -> None:
    """A tenant with much in the host tier alone does not give way in the pool as if it held that there."""
    turns = Turns(make_manager(12, num_host_blocks=40))
    store = turns.kv.sessions
    store.tools._durations["a", "slow"] = Duration(9.0, 1.0, 9)
    for number, tenant in enumerate("aaabba"):
        name = f"s{number}"
        turns.run(kv_request(name, [100 * number + token for token in range(8)], session_id=name, tenant=tenant))
        store.pause(tenant, name, ["slow" if number == 5 else "x"], 0.0)
        if number < 3:
            store._evict(store._sessions[tenant, name])
            turns.step()
    assert turns.kv.allocate(9, 32)
    assert [session.tenant for session in store._sessions.values() if session.blocks] == ["b", "a"]
