"""Models of transformers get CUDA graphs if a trial shows that these compute the same; recorded on a CPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from support.long_runs import slow
from support.models import tiny_models
from support.runner.decode_workloads import KINDS, workload
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import StepLoop
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import CausalLM
from tidewheel.models.transformers_model import TransformersModel
from tidewheel.runner import model_runner
from tidewheel.runner.model_runner import ModelRunner

Forward = Callable[..., torch.Tensor]
MODELS = {
    make.__name__: make
    for make in (
        tiny_models.gemma2, tiny_models.gpt2, tiny_models.phi3,
    )
}  # fmt: skip
MORE_MODELS = {
    make.__name__: make
    for make in (tiny_models.gpt_neox, tiny_models.opt, tiny_models.stablelm, tiny_models.granite)
}  # fmt: skip


def config_of(folder: Path, make: Callable[[], PreTrainedModel]) -> EngineConfig:
    tiny_models.save(make, folder)
    return EngineConfig(
        model=str(folder), dtype="float32", device="cpu", max_num_seqs=5, max_num_batched_tokens=64, max_model_len=96,
        num_blocks=64, block_size=16, num_threads=1, enable_prefix_caching=False,
    )  # fmt: skip


def altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[CausalLM, torch.Tensor], torch.Tensor]) -> None:
    forward: Forward = TransformersModel.forward
    monkeypatch.setattr(TransformersModel, "forward", lambda self, *given: alter(self, forward(self, *given)))


def verdict(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [line for line in caplog.messages if "CUDA graphs" in line]
    return line


@pytest.mark.parametrize("name", [*MODELS, *slow(MORE_MODELS)])
def test_graphs_of_a_model_that_passes_compute_as_it_does(
    name: str, tmp_path: Path, accelerator: RecordingAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, (MODELS | MORE_MODELS)[name])
    with caplog.at_level(logging.INFO):
        runner = ModelRunner.load(config)
    assert "computed the same in a trial" in verdict(caplog)
    assert len(accelerator.pools[-1].graphs) == 3 * len(LOADED_SIZES)
    requests = workload(KINDS["filtered"], 6)
    with_graphs = StepLoop(runner).run(requests)
    assert sum(graph.num_replays > 1 for graph in accelerator.pools[-1].graphs) > 0
    with mock.patch.object(model_runner, "accelerator_of", return_value=None):
        plain = ModelRunner.load(config)
    assert with_graphs == StepLoop(plain).run(workload(KINDS["filtered"], 6))


def test_a_model_that_reads_values_is_not_captured(
    tmp_path: Path,
    accelerator: RecordingAccelerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(tmp_path, tiny_models.gpt2)
    altered(monkeypatch, lambda model, logits: logits * (1.0 if logits.sum().item() else 0.0))
    with caplog.at_level(logging.INFO):
        runner = ModelRunner.load(config)
    assert "none of GPT2LMHeadModel: no graph can hold a step: item waits for the device" in verdict(caplog)
    assert accelerator.pools == []  # nothing was captured
    assert runner.info.graph_bytes == 0
    assert StepLoop(runner).run(workload(KINDS["filtered"], 3))


def test_a_capture_that_fails_leaves_a_runner_without_graphs(
    tmp_path: Path,
    accelerator: RecordingAccelerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch overlooks some operations that wait: the model begins to read values in the fifth call, the capture."""
    config, calls = config_of(tmp_path, tiny_models.gpt2), iter(range(1, 1000))
    altered(monkeypatch, lambda model, logits: logits * (logits.sum().item() ** 0 if next(calls) >= 5 else 1.0))
    with caplog.at_level(logging.INFO):
        runner = ModelRunner.load(config)
    assert "GPT2LMHeadModel: no graph can hold a step: item waits for the device" in verdict(caplog)
    assert [len(pool.graphs) for pool in accelerator.pools] == [0]
    accelerator.allocator.empty_cache()
    assert StepLoop(runner).run(workload(KINDS["filtered"], 3))


@pytest.mark.parametrize("last_good_call", [5, 8])
def test_a_model_whose_host_changes_what_it_computes_has_no_graphs(
    last_good_call: int,
    tmp_path: Path,
    accelerator: RecordingAccelerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call fills the cache, two are watched, two capture, and two compute what is compared."""
    config, calls = config_of(tmp_path, tiny_models.gpt2), iter(range(1, 1000))
    altered(monkeypatch, lambda model, logits: logits + (0.0 if next(calls) <= last_good_call else logits.abs()))
    with caplog.at_level(logging.INFO):
        ModelRunner.load(config)
    assert ("a replay changes its logits by" in verdict(caplog)) == (last_good_call < 7)


def test_logits_that_are_no_numbers_are_no_agreement(
    tmp_path: Path,
    accelerator: RecordingAccelerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(tmp_path, tiny_models.gpt2)
    altered(monkeypatch, lambda model, logits: logits * torch.nan)
    with caplog.at_level(logging.INFO):
        ModelRunner.load(config)
    assert "a replay changes its logits by nan" in verdict(caplog)


def test_a_context_that_is_too_short_for_a_trial_has_no_graphs(
    tmp_path: Path, accelerator: RecordingAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(config_of(tmp_path, tiny_models.gpt2), max_model_len=2)
    with caplog.at_level(logging.INFO):
        ModelRunner.load(config)
    assert "max_model_len or max_num_batched_tokens is too small for a trial" in verdict(caplog)
