"""The programs that measure the scheduler: dry runs of each, and the arithmetic behind their figures."""

from __future__ import annotations

import pytest

from engine import kv_pressure, refusal_cost, scheduler_cost, shared_prefixes

ONCE = refusal_cost.Patience(2, 60.0)


def test_every_request_of_a_full_pool_ends() -> None:
    load = kv_pressure.Load(
        requests=40, pool=5, rows=32, prompt="uniform:60", output="lognormal:100:0.6:300", rate=60.0
    )
    figures = kv_pressure.measure(load, "priority", "on", seed=0)
    assert figures["finished"] == 40
    assert figures["tokens_over_needed"] >= 1.0
    assert figures == kv_pressure.measure(load, "priority", "on", seed=0)


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_full_waiting_set_refuses_and_evicts(policy: str) -> None:
    setting = refusal_cost.Setting(policy=policy, waiting=16, tenants=4)
    assert refusal_cost.full(setting, ONCE)["outcome"] == "refused"
    assert refusal_cost.evicting(setting, ONCE)["outcome"] == "evicts 1"


def test_messages_are_accepted_or_refused_for_their_rate() -> None:
    free = refusal_cost.Setting(policy="priority", waiting=16)
    limited = refusal_cost.Setting(policy="priority", waiting=16, requests_per_s=1e-6)
    assert refusal_cost.message("message", free, ONCE, num_biases=3)["outcome"] == "accepted"
    assert refusal_cost.message("message", limited, ONCE, num_biases=3)["outcome"] == "refused"


def test_requests_of_conversations_find_what_was_said_before() -> None:
    chats = shared_prefixes.Chats(conversations=4, prefixes=2, prefix_tokens=64, turns=2, rows=2)
    figures = shared_prefixes.converse(shared_prefixes.modelled, "arrival", 0, chats)
    assert figures["prompt_tokens"] == 4 * ((64 + 96) + (64 + 96 + 32 + 96))
    assert 0.0 < figures["hit_rate"] < 1.0 and figures["computed_over_distinct"] >= 1.0


def test_a_burst_computes_each_distinct_token() -> None:
    bursts = shared_prefixes.Bursts(bursts=2, requests=4, prefix_tokens=64, decoding=2)
    figures = shared_prefixes.burst(shared_prefixes.modelled, "arrival", 0, bursts)
    assert figures["computed_over_distinct"] >= 1.0


def test_a_ratio_is_this_checkout_over_the_other() -> None:
    cost = dict.fromkeys(scheduler_cost.MEASURED, 10.0) | {"running": 4, "policy": "fair", "finished": 0}
    slower = cost | {"apply_us": 40.0}
    case = scheduler_cost.compare_case({"this": [cost, cost, slower], "against": [slower, slower, cost]})
    assert case["apply_us"]["ratio"] == 0.25 and case["schedule_us"]["ratio"] == 1.0
    assert case["apply_us"]["this"]["samples"] == [10.0, 10.0, 40.0]
