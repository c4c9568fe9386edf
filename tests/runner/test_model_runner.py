"""The runner as the engine sees it: loading, facts, launches, and errors in one line."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support.models import tiny_models
from support.runner.step_loop import StepLoop, request
from tidewheel.batch import NO_TRANSFERS, SPARE_LOGITS, NewRow, SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.request import Request
from tidewheel.runner.loading import graph_sizes
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes
from tidewheel.runner.thread_count import StepThreads
from tidewheel.sampling import SamplingParams


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def new_row(row: int, prompt: np.ndarray, sampling: SamplingParams, **fields: object) -> NewRow:
    request = Request("r", prompt, sampling, max_tokens=1, arrival_time=0.0, **fields)
    return NewRow(row, request, prompt, sampling)


def prefill(
    tokens: np.ndarray, *, row: int = 0, blocks: tuple[int, ...] = (0,), samples: bool = True
) -> ScheduledBatch:
    greedy = SamplingParams(temperature=0.0)
    return ScheduledBatch(
        step_id=5, rows=int32(row), start_positions=int32(0), num_scheduled_tokens=int32(len(tokens)),
        samples=np.array([samples]), num_decodes=0, num_tokens=len(tokens),
        new_rows=(new_row(row, tokens, greedy),),
        block_rows=int32(*[row] * len(blocks)), block_indices=np.arange(len(blocks), dtype=np.int32),
        block_ids=int32(*blocks),
    )  # fmt: skip


def decode(position: int, *, row: int = 0, **more: object) -> ScheduledBatch:
    return ScheduledBatch(
        step_id=6, rows=int32(row), start_positions=int32(position), num_scheduled_tokens=int32(1),
        samples=np.array([True]), num_decodes=1, num_tokens=1, **more,
    )  # fmt: skip


def test_info_states_what_was_resolved(runner: ModelRunner, checkpoint: Path) -> None:
    info = runner.info
    assert (info.model, info.architecture, info.dtype) == (str(checkpoint), "LlamaForCausalLM", "float32")
    assert (info.vocab_size, info.max_model_len) == (tiny_models.VOCAB_SIZE, tiny_models.CONTEXT)
    assert (info.num_blocks, info.block_size, info.max_num_seqs) == (64, 16, 16)
    assert info.kv_cache_bytes == 64 * 16 * 2 * 2 * 2 * 16 * 4
    assert info.weights_bytes > 0
    assert info.activation_bytes > 0
    assert info.device.startswith("cpu (1 thread")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_cpu_has_no_graphs_and_says_so_once(
    config: EngineConfig, caplog: pytest.LogCaptureFixture, enforce_eager: bool
) -> None:
    with caplog.at_level(logging.INFO):
        runner = ModelRunner.load(dataclasses.replace(config, enforce_eager=enforce_eager))
    assert runner.info.graph_bytes == 0
    assert [line for line in caplog.messages if "CUDA graphs" in line] == ["CUDA graphs: none, the device is a CPU"]


def test_graphs_are_for_a_gpu_and_whoever_wants_them(config: EngineConfig) -> None:
    gpu = mock.Mock(device=torch.device("cuda"), model=mock.Mock(spec=Decoder, shape=mock.Mock()))
    gpu.info.max_num_seqs = 9
    config = dataclasses.replace(config, max_num_batched_tokens=6)
    assert graph_sizes(config, gpu) == ([1, 2, 4, 6], [16], [])
    assert graph_sizes(dataclasses.replace(config, enforce_eager=True), gpu) == GraphSizes()
    gpu.model = mock.Mock(spec=["forward", "is_capturable", "shape"])
    assert graph_sizes(config, gpu) == ([1, 2, 4, 6], (), [])


def test_graphs_hold_the_rows_of_a_model_that_has_fewer_than_the_setting(config: EngineConfig) -> None:
    gpu = mock.Mock(device=torch.device("cuda"), model=mock.Mock(spec=["shape"]))
    gpu.info.max_num_seqs = 9  # as many encoded recordings have room
    config = dataclasses.replace(config, max_num_seqs=256, max_num_batched_tokens=256, deterministic=True)
    assert max(graph_sizes(config, gpu).decodes) == 9
    assert max(graph_sizes(dataclasses.replace(config, speculation="prompt_lookup"), gpu).decodes) == 9 + SPARE_LOGITS


def test_loading_reports_its_progress(config: EngineConfig) -> None:
    seen: list[tuple[str, float]] = []
    ModelRunner.load(config, lambda stage, fraction: seen.append((stage, fraction)))
    assert [stage for stage, _ in seen if stage != "weights"] == ["profile", "profile"]
    assert ("weights", 1.0) in seen
    assert seen[-1] == ("profile", 1.0)


def test_sampled_tokens_stay_in_the_row(runner: ModelRunner) -> None:
    """The decode steps say where to compute, never which token."""
    prompt = tiny_models.prompts(1, 20, 20)[0]
    expected = StepLoop(runner).run([request("r", prompt, 4)])[0]
    tokens = [runner.run(prefill(prompt, blocks=(3, 1)))]
    tokens += [runner.run(decode(20 + i)) for i in range(3)]
    assert [int(step.token_ids[0]) for step in tokens] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_formats_come_close_to_float32(config: EngineConfig, dtype: str) -> None:
    asked = SamplingParams(temperature=0.0, logprobs=1)
    prompt = tiny_models.prompts(1, 40, 40)[0]

    def logprob(name: str) -> float:
        runner = ModelRunner.load(dataclasses.replace(config, dtype=name))
        assert runner.info.dtype == name
        batch = dataclasses.replace(prefill(prompt, blocks=(0, 1, 2)), new_rows=(new_row(0, prompt, asked),))
        logprobs = runner.run(batch).logprobs
        assert logprobs is not None
        return logprobs[0].logprob

    assert logprob(dtype) == pytest.approx(logprob("float32"), abs=0.1)


def test_the_calling_thread_is_let_go_when_a_step_raises(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = StepThreads(1)
    threads.own = own = mock.Mock()
    monkeypatch.setattr(runner, "_threads", threads)
    monkeypatch.setattr(runner, "_launch", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        runner.launch(prefill(int32(1, 2)))
    assert [call[0] for call in own.method_calls] == ["begin_step", "end_step"]


def test_a_launch_answers_every_wait_alike(runner: ModelRunner) -> None:
    pending = runner.launch(prefill(int32(1, 2, 3)))
    first = pending.wait()
    assert pending.wait() is first
    assert first.step_id == 5


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(runner: ModelRunner) -> None:
    sampled = runner.run(prefill(int32(1, 2, 3), samples=False))
    assert sampled.token_ids.tolist() == [SampledTokens.NOT_SAMPLED]
    assert sampled.logprobs is None


def test_copied_blocks_carry_their_content(runner: ModelRunner) -> None:
    prompt = tiny_models.prompts(1, 16, 16)[0]
    first = runner.run(prefill(prompt, blocks=(3, 4)))
    expected = runner.run(decode(16))
    runner.run(prefill(prompt, blocks=(3, 4)))
    moved = decode(
        16, transfers=NO_TRANSFERS._replace(copy_sources=int32(3), copy_targets=int32(7)),
        block_rows=int32(0), block_indices=int32(0), block_ids=int32(7),
    )  # fmt: skip
    assert first.token_ids[0] >= 0
    keys = runner.kv.layers[0].keys
    keys[7].fill_(float("nan"))
    assert runner.run(moved).token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("wrong", [tiny_models.VOCAB_SIZE, 2**31 - 1, -1])
def test_a_token_out_of_range_ends_nothing(runner: ModelRunner, wrong: int) -> None:
    """The host checks ids; on a device, one that came through would end all requests."""
    prompt = tiny_models.prompts(1, 10, 10)[0]
    expected = runner.run(prefill(prompt)).token_ids.tolist()
    runner.run(prefill(int32(5, wrong, 6), row=1, blocks=(1,)))
    assert runner.run(prefill(prompt)).token_ids.tolist() == expected


def test_a_row_is_taken_over_without_a_trace(runner: ModelRunner) -> None:
    prompt = tiny_models.prompts(1, 10, 10)[0]
    expected = runner.run(prefill(prompt)).token_ids.tolist()
    special = SamplingParams(temperature=2.0, logit_bias={1: 50.0}, repetition_penalty=2.0, logprobs=3)
    other = dataclasses.replace(
        prefill(int32(5, 6)), new_rows=(new_row(0, int32(5, 6), special, seed=9, stop_token_ids=(1,)),)
    )
    assert runner.run(other).token_ids.tolist() == [1]
    again = runner.run(dataclasses.replace(prefill(prompt), freed_rows=int32(0)))
    assert again.token_ids.tolist() == expected
    assert again.logprobs is None


def test_the_last_position_of_the_context_can_be_computed(config: EngineConfig) -> None:
    runner = ModelRunner.load(dataclasses.replace(config, max_model_len=32))
    prompt = tiny_models.prompts(1, 31, 31)[0]
    assert len(StepLoop(runner).run([request("r", prompt, 1)])[0]) == 1
    full = tiny_models.prompts(1, 32, 32)[0]
    assert runner.run(prefill(full, blocks=(0, 1))).token_ids[0] >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_blocks": 15, "max_model_len": 256},
            "max_model_len is 256, but num_blocks 15 gives a KV cache of 240 tokens",
        ),
        ({"max_model_len": 1000}, "max_model_len is 1000: the model was made for at most 256 tokens"),
        ({"model": "/no/such/folder"}, "no such folder"),
        ({"num_blocks": 10**12}, "host memory does not suffice: KV cache .* lower num_blocks"),
    ],
)
def test_impossible_settings_stop_the_load(config: EngineConfig, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelRunner.load(dataclasses.replace(config, **changes))
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model_stops_the_load(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(ConfigError, match="architecture 'NoSuchModel' is unknown"):
        ModelRunner.load(dataclasses.replace(config, model=str(tmp_path)))
