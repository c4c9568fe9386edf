from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelled.roofline import SHAPES, decode_seconds
from modelled.step_model import (
    BATCHES,
    BUDGET,
    FACTORS,
    MAX_NUM_SEQS,
    Host,
    Model,
    Work,
    lost,
    predict,
    random_lengths,
    workload,
)
from tidewheel.runner.step_graphs import MOST_TOKENS

HOST = Host(580e-6, 55e-6, 15e-6)
SMALL = SHAPES["qwen3-0.6b"]


def test_every_token_of_the_workload_is_computed_once() -> None:
    lengths = random_lengths()
    steps = list(workload(lengths))
    assert sum(step.prompt_tokens for step in steps) == sum(num_input for num_input, _ in lengths)
    assert sum(step.decodes + step.prompts for step in steps) == sum(num_output for _, num_output in lengths)
    assert sum(step.prompt_keys for step in steps) == sum(num_input**2 / 2 for num_input, _ in lengths)
    assert all(step.decodes + step.prompt_tokens <= BUDGET for step in steps)
    assert max(step.decodes for step in steps) == MAX_NUM_SEQS


def test_a_step_takes_the_longer_of_device_and_host() -> None:
    model = Model(SMALL, HOST, "slow")
    decode, eager = model.step(Work(8, 512)), model.step(Work(8, 512, MOST_TOKENS, 4096, 1))
    assert decode.host_s == HOST.step_s and decode.seconds == decode.device_s > decode.host_s
    assert eager.host_s == pytest.approx(HOST.step_s + SMALL.layers * (55e-6 + FACTORS["driver and cuBLAS"].slow))
    between = model.step(Work(8, 512, 64, 2048, 1))
    of_layer = 15e-6 + FACTORS["graph between attentions"].slow
    assert between.host_s == pytest.approx(HOST.step_s + SMALL.layers * of_layer)
    slow_host = Model(SMALL, HOST._replace(attention_s=1e-3), "slow").step(Work(8, 512, 64, 2048, 1))
    assert slow_host.seconds == slow_host.host_s > slow_host.device_s == between.device_s


@pytest.mark.parametrize("name", BATCHES)
def test_predictions_keep_to_the_limits(name: str) -> None:
    predicted = predict(name, HOST)
    low, high = predicted["tokens_per_s"]
    assert low < high < predicted["tokens_per_s_limit"]
    fast, slow = predicted["decode_step"]["ms"]
    assert 1e3 * decode_seconds(SHAPES[name], BATCHES[name], 512) < fast < slow
    cache, weights, both = (predicted[f"fp8_{kind}"]["tokens_per_s"] for kind in ("cache", "weights", "both"))
    assert all(wide < narrow for wide, narrow in zip(predicted["tokens_per_s"], cache, strict=True))
    if name == "llama-3.1-8b":  # the small model gains no more than roundings take
        assert all(max(pair) < of_both for *pair, of_both in zip(cache, weights, both, strict=True))
    assert predicted["fp8_cache"]["decode_step_ms"][0] < fast and predicted["fp8_cache"]["decode_step_ms"][1] < slow
    for row in predicted["served"]:
        assert row["host_bound"] or row["lost_percent"] == [0.0, 0.0]


def test_slower_launches_lose_more() -> None:
    quick, slow = (Model(SMALL, Host(580e-6, layer_s, layer_s), "fast") for layer_s in (20e-6, 230e-6))
    assert 0.0 <= lost(quick, 32) < lost(slow, 32) < 1.0


@pytest.mark.slow
def test_launches_of_a_layer_reach_the_stub_driver() -> None:
    """Compiles the kernels of a layer for sm_90."""
    programs = Path(__file__).parents[2] / "benchmarks"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, programs, "eager_layer"], env=environment, capture_output=True, text=True, check=True
    )
    for kinds in json.loads(result.stdout).values():
        assert [time["launches"] for time in kinds.values()] == [5, 7, 7]
        assert [time["attention_launches"] for time in kinds.values()] == [1, 3, 3]
        assert all(0 < time["attention_us"] < time["host_us"] < time["triton_us"] for time in kinds.values())
