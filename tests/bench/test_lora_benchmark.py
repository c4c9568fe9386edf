"""Parts of `python benchmarks lora` and `lora_churn`: adapters, judgement of answers, the step model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.random_adapters import make_adapter
from engine.lora import CASES, LONE_CASES, OFF, ON, base_name, rows, runs
from engine.lora_churn import Answer
from modelled.lora_model import predictions
from modelled.roofline import SHAPES


def test_an_adapter_has_two_matrices_for_each_linear_of_each_layer(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, SHAPES["tiny"], seed=0, rank=4, targets=("q_proj", "down_proj"))
    sizes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    assert len(sizes) == 2 * 2 * SHAPES["tiny"].layers
    assert sizes["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (4, 128)
    assert sizes["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"] == (64, 4)
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [([1, 0, 1], "same"), ([1], "same"), ([1, 2, 5], "tie"), ([1, 1, 1], "other")],
    ids=["all tokens", "fewer tokens", "as good within rounding", "another"],
)
def test_an_answer_is_judged_at_its_first_other_token(tokens: list[int], verdict: str) -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [4.0, 1.0, 4.0 - 1e-6], [0.0, 3.0, 1.0]])
    assert Answer([1, 0, 1], logits).judge(tokens) == verdict


def test_figures_are_compared_with_those_of_the_base_beside_them() -> None:
    def figures(rate: float) -> dict[str, object]:
        return {"tokens_per_s": rate, "gap_p50_ms": 1e3 / rate, "first_token_ms": 1.0, "samples": [rate, 2 * rate]}

    cases = (*CASES, *LONE_CASES)
    found = {case.name: figures(100.0) for case in cases}
    found |= {base_name(case): figures(100.0 if case.streams > 1 else 200.0) for case in cases}
    of_base = [line["of base"] for line in rows(cases, found)]
    assert of_base == [1.0] * len(CASES) + [1.0, 0.5, 0.5]  # the first lone one is the base


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[tuple[object, object]] = []  # prompts and counts of each run
        self.has_lora_path = True  # in the last run

    def run(self, prompts: object, counts: object, loras: object = (), *, has_lora_path: bool = True) -> None:
        self.asked.append((prompts, counts))
        self.has_lora_path = has_lora_path


def test_the_base_runs_beside_each_case_with_its_prompts() -> None:
    engine, cases = FakeEngine(), (*CASES, *LONE_CASES)
    turns = runs({ON: engine}, cases, (2, 9), 100)  # type: ignore[dict-item]
    names = list(turns)
    for case in cases:
        if case.engine == OFF:
            continue
        assert names[names.index(case.name) - 1] == base_name(case)
        for _ in range(2):
            turns[base_name(case)]()
            assert not engine.has_lora_path
            turns[case.name]()
            assert engine.has_lora_path and engine.asked[-1] == engine.asked[-2]
        assert engine.asked[-1] != engine.asked[-3], "other prompts in each round"


def test_streams_take_the_adapters_by_turns() -> None:
    streams = CASES[3].loras
    assert len(streams) == 64
    assert streams.count("all0") == streams.count("all31") == 2


def test_more_adapters_and_more_linears_keep_less_of_the_base_speed() -> None:
    kept = {(row["model"], row["adapters"], row["linears"]): row["of_base"] for row in predictions()}
    for model in ("qwen3-0.6b", "qwen3-8b"):
        for end in (0, 1):
            values = [kept[model, 32, "all"][end], kept[model, 1, "all"][end], kept[model, 1, "q,k,v"][end]]
            assert values == sorted(values)
            assert 0.5 < values[0] < values[-1] < 1.0
