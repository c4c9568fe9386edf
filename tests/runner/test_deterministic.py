"""The setting `deterministic` reaches the layers, or the load says in one line why it cannot be promised."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from support.models import tiny_models
from support.runner.decode_workloads import KINDS, workload
from support.runner.step_loop import StepLoop
from tidewheel.config import CacheDType, EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.linear import InvariantLinear
from tidewheel.models.loader import OFFERED_THROUGH_TRANSFORMERS, refuse_others
from tidewheel.runner import device, loading
from tidewheel.runner.model_runner import ModelRunner
from tidewheel_kernels.attention import _INVARIANT, _OP

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_kernels_that_do_not_promise_it_are_refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelRunner.load(dataclasses.replace(config, deterministic=True))
    assert str(caught.value) == (
        "deterministic is true, which only triton-lang's kernels promise, and here others run: use a GPU, and leave "
        "TIDEWHEEL_KERNELS out, or set it to false"
    )
    device.check_deterministic(False, CPU)
    device.check_deterministic(True, CUDA)
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "reference")
    with pytest.raises(ConfigError):
        device.check_deterministic(True, CUDA)


def test_models_that_run_through_transformers_are_refused() -> None:
    offered = OFFERED_THROUGH_TRANSFORMERS
    with pytest.raises(ConfigError, match="deterministic is true: GPT2 runs through transformers"):
        refuse_others(EngineConfig(model="m", deterministic=True), offered, "GPT2 runs through transformers")
    refuse_others(EngineConfig(model="m"), offered, "GPT2 runs through transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_every_product_and_attention_keeps_rows_apart(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """With the references in place of the kernels, which compute the same but for the last bits."""
    tiny_models.save(lambda: tiny_models.qwen2(tie_word_embeddings=tied), tmp_path)
    config = dataclasses.replace(config, model=str(tmp_path), max_model_len=128)
    expected = StepLoop(ModelRunner.load(config)).run(workload(KINDS["greedy"], 6))
    monkeypatch.setattr(loading, "check_deterministic", lambda *_: None)
    runner = ModelRunner.load(dataclasses.replace(config, deterministic=True))
    linears = runner._steps.model._linears
    assert {type(layer) for layer in linears} == {InvariantLinear} and len(linears) == 4 * 2 + 1
    calls = []
    invariant = _INVARIANT.implementation("reference")
    monkeypatch.setattr(_INVARIANT, "chosen", {(CPU, torch.float32): lambda *given: calls.append(invariant(*given))})
    monkeypatch.setattr(_OP, "chosen", defaultdict(lambda: None))
    assert StepLoop(runner).run(workload(KINDS["greedy"], 6)) == expected
    assert calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_tokens_with_graphs_beside_others_are_those_without_and_alone(
    config: EngineConfig, kv_cache_dtype: CacheDType
) -> None:
    config = dataclasses.replace(
        config, device="cuda", dtype="bfloat16", deterministic=True, max_model_len=128, kv_cache_dtype=kv_cache_dtype
    )
    eager = ModelRunner.load(dataclasses.replace(config, enforce_eager=True))
    work = [lambda i=i: workload(KINDS["everything"], 8)[i] for i in range(8)]
    alone = [StepLoop(eager, prefix_caching=False).run([make()])[0] for make in work]
    graphed = StepLoop(ModelRunner.load(config), num_blocks=20, token_budget=40)
    for _ in range(2):
        assert graphed.run([make() for make in work]) == alone


def test_logits_have_one_dtype(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "check_deterministic", lambda *_: None)
    found = []
    for deterministic in (False, True):
        settings = {"dtype": "float16", "deterministic": deterministic}
        runner = ModelRunner.load(dataclasses.replace(config, **settings))
        states = torch.zeros(1, runner._steps.model.shape.hidden_size, dtype=torch.float16)
        found.append(runner._steps.model.logits(states, states, torch.tensor([0])).dtype)
    assert found == [torch.float16, torch.float32]
