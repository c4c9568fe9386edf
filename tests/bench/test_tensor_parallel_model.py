"""Decode steps of a model on several GPUs, as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelled.roofline import SHAPES, kv_bytes_per_token, part_of, weights_bytes
from modelled.step_model import Host, Model, Work
from modelled.tensor_parallel import ENDS, MACHINES, NVLINK, TensorParallelModel
from modelled.tensor_parallel_model import (
    FASTEST,
    RANKS,
    SERVED,
    arrangements,
    at_ends,
    check_all_reduces,
    check_steps,
    cost_model,
    goal,
    predict,
    prompts,
)
from tidewheel.record.recorded_events import StepFeatures
from tidewheel.simulate.cost_model import CostModel

LLAMA, H100 = SHAPES["llama-3.1-8b"], MACHINES["H100 SXM"]


def model(num_ranks: int, *, host_s: float = 0.0, gathers_candidates: bool = True) -> TensorParallelModel:
    return TensorParallelModel(
        LLAMA, H100, num_ranks, "slow", ways=FASTEST, host_s=host_s, gathers_candidates=gathers_candidates
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_hold_equal_parts(num_ranks: int) -> None:
    part = part_of(LLAMA, num_ranks)
    assert num_ranks * weights_bytes(part) == weights_bytes(LLAMA)
    assert num_ranks * kv_bytes_per_token(part) == kv_bytes_per_token(LLAMA)


def test_ranks_share_a_key_value_head_if_there_are_too_few() -> None:
    part = part_of(LLAMA, 16)
    assert part.kv_heads == 1 and part.heads == 2
    assert 16 * kv_bytes_per_token(part) == 2 * kv_bytes_per_token(LLAMA)
    assert 16 * weights_bytes(part) > weights_bytes(LLAMA)


def test_one_rank_takes_what_the_step_model_says() -> None:
    alone = Model(LLAMA, Host(0.0, 0.0, 0.0), "slow", device=H100.device).step(Work(128, 1024)).device_s
    assert model(1).seconds(128, 1024) == alone and model(1).num_all_reduces == 0


def test_a_step_of_ranks_has_two_all_reduces_for_a_layer_and_one_for_the_embedding() -> None:
    four = model(4)
    assert four.num_all_reduces == 65
    added = four.seconds(128, 1024) - four.seconds_without_all_reduces(128, 1024)
    assert added == pytest.approx(65 * four.all_reduce_seconds(128))
    assert four.all_reduce_seconds(128) == min(NVLINK[way].seconds(128 * 4096 * 2, 4, "slow") for way in FASTEST)


def test_gathering_all_logits_takes_longer() -> None:
    candidates, logits = model(4), model(4, gathers_candidates=False)
    assert logits.seconds(128, 1024) > candidates.seconds(128, 1024)
    assert model(1, gathers_candidates=False).seconds(128, 1024) == model(1).seconds(128, 1024)


def test_a_slow_host_sets_the_time_of_a_step() -> None:
    assert model(4, host_s=1.0).seconds(1, 1024) == pytest.approx(1.0, abs=1e-4)


def test_requests_without_room_wait() -> None:
    one, four = model(1), model(4)
    assert one.num_running(128, 4096) == one.max_kv_tokens // 4096 < 128
    assert four.num_running(128, 4096) == 128
    assert one.tokens_per_s(128, 4096) == one.tokens_per_s(one.num_running(128, 4096), 4096)
    assert one.tokens_per_s(1, 10**9) == 0.0


def test_published_all_reduces_are_met() -> None:
    assert all(abs(row["error %"]) <= 20 for row in check_all_reduces())


def test_published_steps_are_met() -> None:
    errors = {(row["engine"], row["ranks"], row["batch"]): row["error %"] for row in check_steps() if row["error %"]}
    assert all(abs(error) <= 10 for (_, ranks, batch), error in errors.items() if ranks > 1 and batch <= 32)
    assert all(abs(error) <= 25 for error in errors.values())


def test_more_ranks_decode_faster_and_less_than_in_proportion() -> None:
    for row in predict("llama-3.1-8b", "H100 SXM", SERVED):
        if row["context"] == 1024:
            assert row["ranks"] == 1 or all(1 < times < row["ranks"] for times in row["times"])


def test_the_goal_is_out_of_reach_at_short_contexts_and_within_reach_at_long_ones() -> None:
    figures = goal("llama-3.1-8b", "H100 SXM", FASTEST)
    assert all(2.5 < times < 3.0 for times in figures["times"])
    assert all(times >= 3.0 for times in figures["times if all-reduces took no time"])
    assert all(2048 <= context <= 2560 for context in figures["context for the goal"])
    for end, needed in zip(ENDS, figures["us of an all-reduce for the goal"], strict=True):
        one, four = (at_ends("llama-3.1-8b", "H100 SXM", ranks, FASTEST)[ENDS.index(end)] for ranks in (1, 4))
        seconds = four.seconds_without_all_reduces(128, 1024) + 65 * 1e-6 * needed
        assert one.seconds(128, 1024) / seconds == pytest.approx(3.0)


def test_few_requests_want_ranks_and_many_want_replicas() -> None:
    rows = {(row["context"], row["requests"]): row for row in arrangements("llama-3.1-8b", "H100 SXM")}
    few, many = rows[1024, 32], rows[1024, 1024]
    assert min(few["1 x 4"]) > max(few["4 x 1"]) and min(many["4 x 1"]) > max(many["1 x 4"])


def test_prompts_gain_less_over_pcie() -> None:
    over = {machine: list(prompts("llama-3.1-8b", machine))[-1]["4 ranks"] for machine in ("H100 SXM", "RTX 4090")}
    assert min(over["H100 SXM"]) > max(over["RTX 4090"]) > 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_simulator_takes_ranks_as_one_device(num_ranks: int, tmp_path: Path) -> None:
    cost_model("llama-3.1-8b", "H100 SXM", num_ranks).save(tmp_path / "cost.json")
    cost = CostModel.load(tmp_path / "cost.json")
    step = StepFeatures(128, 128, 128, 0, 128 * 1024, 0)
    slow, fast = (ends.seconds(128, 1024) for ends in at_ends("llama-3.1-8b", "H100 SXM", num_ranks, SERVED))
    assert fast <= cost.step_seconds(step) <= slow
