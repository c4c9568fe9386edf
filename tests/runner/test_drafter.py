"""Drafts that a model makes change no token, and a model that drafts for itself is always right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from support.models import tiny_models
from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import GREEDY, StepLoop, poison, request
from tidewheel.batch import NO_DRAFT, NOT_DRAFTED, Int32Array, RowArray, SampledTokens, ScheduledBatch, accepted
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models import loader
from tidewheel.models.causal_lm import ForwardInput
from tidewheel.request import Request
from tidewheel.runner.drafter import IDLE_STEPS, MOST_AS_DECODES, DecoderDraft, Drafter
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.warm_up import warm_up_batches
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.goodput import Goodput

NUM_TOKENS = 24
NUM_DRAFTS = 4
SAMPLED = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1, logprobs=2)


@pytest.fixture(autouse=True)
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use every draft, whether it pays or not."""
    choose_by(monkeypatch, lambda counts: counts)


def choose_by(monkeypatch: pytest.MonkeyPatch, choose: object) -> None:
    def chosen(_: Goodput, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        wanted = choose(counts).astype(np.int32)
        return np.clip(budget - np.cumsum(wanted) + wanted, 0, wanted).astype(np.int32)

    monkeypatch.setattr(Goodput, "choose", chosen)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("byte-llama")
    tiny_models.save_byte_llama(folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model over the same bytes."""
    folder = tmp_path_factory.mktemp("other-llama")
    tiny_models.save_byte_llama(folder)
    tiny_models.save(lambda: tiny_models.llama(vocab_size=256, num_hidden_layers=1, hidden_size=32), folder)
    return folder


def settings(model: Path, **more: object) -> EngineConfig:
    given = {"max_num_seqs": 8, "num_blocks": 64, "block_size": 16, "num_threads": 1, **more}
    return EngineConfig(model=str(model), dtype="float32", device="cpu", **given)


def drafted_by(draft: Path, model: Path, **more: object) -> EngineConfig:
    return settings(model, speculation="draft_model", draft_model=str(draft), **more)


def loop_of(runner: ModelRunner, **more: object) -> StepLoop:
    """Return a loop with drafts over a cache, and that of the drafts, in which only what is written is a number."""
    poison(runner)
    for keys, values, _ in runner._drafter._model.kv_layers:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    runner._drafter._is_cached[:] = False
    return StepLoop(runner, speculation="draft_model", num_speculative_tokens=NUM_DRAFTS, **more)


def prompts(count: int, shortest: int = 5, longest: int = 60, *, seed: int = 0) -> list[Int32Array]:
    return [prompt % 250 for prompt in tiny_models.prompts(count, shortest, longest, seed=seed)]


def requests(
    given: Sequence[Int32Array], sampling: SamplingParams = GREEDY, count: int = NUM_TOKENS
) -> list[Request]:
    return [request(f"r{i}", prompt, count, sampling, seed=i) for i, prompt in enumerate(given)]


@pytest.fixture(scope="module")
def plain(model: Path) -> ModelRunner:
    return ModelRunner.load(settings(model))


def expected(plain: ModelRunner, given: Sequence[Int32Array], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return StepLoop(plain, prefix_caching=False).run(requests(given, sampling))


def acceptance(loop: StepLoop) -> float:
    stats = loop.scheduler.stats()
    assert stats.num_draft_tokens > 0
    return stats.num_accepted_draft_tokens / stats.num_draft_tokens


def check_own(loop: StepLoop, plain: ModelRunner, given: Sequence[Int32Array]) -> None:
    assert loop.run(requests(given)) == expected(plain, given)
    assert acceptance(loop) == 1.0


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_a_model_accepts_all_its_own_drafts(model: Path, kv_cache_dtype: str) -> None:
    plain = ModelRunner.load(settings(model, kv_cache_dtype=kv_cache_dtype))
    runner = ModelRunner.load(drafted_by(model, model, kv_cache_dtype=kv_cache_dtype))
    check_own(StepLoop(runner, speculation="draft_model", num_speculative_tokens=NUM_DRAFTS), plain, prompts(5))


def test_all_layers_accept_all_their_drafts(model: Path, plain: ModelRunner) -> None:
    runner = ModelRunner.load(settings(model, speculation="first_layers", num_draft_layers=2))
    assert runner.info.kv_cache_bytes == plain.info.kv_cache_bytes
    assert runner.info.weights_bytes == plain.info.weights_bytes
    check_own(loop_of(runner), plain, prompts(5))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_wrong_drafts_change_nothing(model: Path, other: Path, plain: ModelRunner, sampling: SamplingParams) -> None:
    for config in (drafted_by(other, model), settings(model, speculation="first_layers")):
        loop = loop_of(ModelRunner.load(config))
        assert loop.run(requests(prompts(5), sampling)) == expected(plain, prompts(5), sampling)
        assert acceptance(loop) < 0.5


def test_rows_catch_up_after_steps_without_drafts(
    model: Path, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may have drafts for some rows, for all, or for none."""
    random = np.random.default_rng(0)
    choose_by(monkeypatch, lambda counts: counts * (random.random(len(counts)) < 0.3))
    check_own(loop_of(ModelRunner.load(drafted_by(model, model))), plain, prompts(8))


def test_rejected_drafts_leave_nothing_behind(
    model: Path, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts of a round are wrong, or none is, and between rounds are steps without drafts."""
    runner, random = ModelRunner.load(drafted_by(model, model)), np.random.default_rng(0)
    draft, run, is_wrong = runner._drafter._model.draft, runner.run, [False]

    def sometimes_wrong(step: ForwardInput, *, is_first: bool) -> torch.Tensor:
        if is_first:
            is_wrong.append(bool(random.random() < 0.5))
        return (draft(step, is_first=is_first) + is_wrong[-1]) % 256

    def checked(batch: ScheduledBatch) -> SampledTokens:
        sampled = run(batch)
        if sampled.draft_tokens is not None:
            counts = accepted(sampled.draft_tokens, sampled.token_ids)
            is_right = (sampled.draft_tokens >= 0) & (not is_wrong[-1])
            assert (counts == ((batch.draft_tokens == NO_DRAFT) | is_right)).all()
        return sampled

    choose_by(monkeypatch, lambda counts: counts * (random.random() < 0.5))
    runner._drafter._model.draft, runner.run = sometimes_wrong, checked
    for seed in range(4):
        loop = loop_of(runner)
        assert loop.run(requests(prompts(2, seed=seed))) == expected(plain, prompts(2, seed=seed))
    assert {True, False} == set(is_wrong)


def test_few_blocks_serve_many_prompts_with_and_without_drafts(
    model: Path, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts share beginnings or go on with a session, whose last block is copied; blocks come to hold others."""
    random = np.random.default_rng(0)
    loop = loop_of(ModelRunner.load(drafted_by(model, model)), num_blocks=14)
    beginnings, last = prompts(3, 30, 60), None
    for seed in range(60):
        choose_by(monkeypatch, partial(np.multiply, random.random() < 0.5))
        beginning = beginnings[random.integers(3)][: random.integers(20, 60)]
        if last is not None and random.random() < 0.5 and last.num_tokens < 120:
            beginning = np.concatenate((last.prompt_token_ids, np.array(last.output_token_ids, dtype=np.int32)))
        prompt = np.concatenate((beginning, prompts(1, 1, 30, seed=seed)[0]))
        last = request("turn", prompt, 8, session_id="s", session_ttl=60.0)
        assert loop.run([last]) == StepLoop(plain, prefix_caching=False).run([request("alone", prompt, 8)])
    assert acceptance(loop) == 1.0
    assert loop.scheduler.stats().num_prefix_hits > 10


def test_preempted_and_swapped_rows_draft_as_before(model: Path, plain: ModelRunner) -> None:
    runner = ModelRunner.load(drafted_by(model, model, swap_space=0.01))
    for mode in ("swap", "recompute"):
        loop = loop_of(runner, num_blocks=8, num_host_blocks=16, preemption_mode=mode)
        check_own(loop, plain, prompts(3, 32, 32))
        assert loop.scheduler.stats().num_preemptions > 0


def num_drafted_tokens(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the tokens that the draft model computes in each step from now on."""
    counts: list[int] = []
    computed = Drafter._computed

    def counted(self: Drafter, step: ScheduledBatch, **more: bool) -> torch.Tensor:
        counts.append(step.num_tokens)
        return computed(self, step, **more)

    monkeypatch.setattr(Drafter, "_computed", counted)
    return counts


def test_rows_that_share_a_prefix_compute_it_once(
    model: Path, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.load(drafted_by(model, model))
    shared = prompts(1, 48, 48)[0]
    first, second = ([np.concatenate((shared, end))] for end in prompts(2, 7, 7, seed=1))
    loop = loop_of(runner)
    counts = num_drafted_tokens(runner, monkeypatch)
    check_own(loop, plain, first)
    assert counts[:2] == [48 + 7, 1], "the prompt is read beside the serving model"
    counts.clear()
    check_own(loop, plain, second)
    assert counts[:2] == [7, 1]
    counts.clear()
    group = requests(second)
    group.append(request("fork", second[0], NUM_TOKENS, leader=group[0]))
    assert loop.run(group) == 2 * expected(plain, second)
    assert acceptance(loop) == 1.0


@pytest.mark.parametrize("budget", [48, 512])
def test_a_long_prompt_is_drafted_for_once_the_draft_model_has_it(
    model: Path, plain: ModelRunner, budget: int
) -> None:
    """After steps without drafts it was not read, and catching up is cut; rows that lack little need not wait."""
    runner = ModelRunner.load(drafted_by(model, model, max_num_batched_tokens=budget))
    runner._drafter._num_idle_steps = IDLE_STEPS
    loop, given = loop_of(runner, token_budget=budget), [*prompts(2, 100, 120), *prompts(1, 6, 6)]
    run, waiting, catching_up, drafted = runner.run, [], [], []

    def seen(batch: ScheduledBatch) -> SampledTokens:
        sampled = run(batch)
        if sampled.draft_tokens is not None:
            waiting.append(set(batch.rows[sampled.draft_tokens == NOT_DRAFTED].tolist()))
            drafted.append(set(batch.rows[sampled.draft_tokens >= 0].tolist()))
            catching_up.append(sampled.has_caught_up)
        return sampled

    runner.run = seen
    check_own(loop, plain, given)
    assert waiting[0] == {0, 1} and not waiting[-1] and catching_up[0] and not catching_up[-1]
    assert set.union(*drafted) == {0, 1, 2} and all(2 not in rows for rows in waiting)


@pytest.mark.usefixtures("one_rounding")
def test_drafts_are_staged_as_on_a_gpu(model: Path, plain: ModelRunner, accelerator: RecordingAccelerator) -> None:
    small = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "max_model_len": 128}
    given = prompts(4, 5, 40)
    for config in (
        drafted_by(model, model, **small),
        settings(model, speculation="first_layers", num_draft_layers=2, **small),
    ):
        loop = loop_of(ModelRunner.load(config), token_budget=64)
        assert loop.run(requests(given)) == expected(plain, given)
        assert acceptance(loop) == 1.0
    assert accelerator.pools[-1].graphs


def test_first_layers_draft_with_the_copy_in_use(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    runner = ModelRunner.load(
        settings(tmp_path, speculation="first_layers", num_draft_layers=2, pressure_quantization="int8")
    )
    loop, run = loop_of(runner), runner.run
    runner.run = lambda batch: run(dataclasses.replace(batch, weights="quantized"))
    loop.run(requests(prompts(3)))
    assert acceptance(loop) == 1.0


def test_a_warm_up_drafts_for_a_row_that_the_draft_model_lacks_and_for_one_that_it_has(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.load(drafted_by(model, model))
    computed = num_drafted_tokens(runner, monkeypatch)
    for batch in warm_up_batches(runner.info, drafts=True):
        runner.run(batch)
    assert computed[0] > MOST_AS_DECODES and computed[-4:] == [9, 1, 1, 1]


def test_the_budget_counts_the_cache_and_the_weights_of_a_draft_model(model: Path, other: Path) -> None:
    def loaded(config: EngineConfig) -> RunnerInfo:
        return ModelRunner.load(dataclasses.replace(config, num_blocks=None, kv_cache_memory_mb=1)).info

    alone, both = loaded(settings(model)), loaded(drafted_by(other, model))
    draft = ModelRunner.load(settings(other)).info
    of_block = sum(info.kv_cache_bytes // info.num_blocks for info in (alone, draft))
    assert both.num_blocks == (1 << 20) // of_block < alone.num_blocks
    assert both.kv_cache_bytes == both.num_blocks * of_block
    assert both.weights_bytes == alone.weights_bytes + draft.weights_bytes


def refusal(config: EngineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelRunner.load(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_drafts_that_cannot_be_are_refused_in_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save_byte_llama(tmp_path)
    assert refusal(settings(model, speculation="first_layers", num_draft_layers=3)) == (
        "num_draft_layers is 3: the model has 2 layers; set it to at most 2"
    )
    tiny_models.save(lambda: tiny_models.llama(vocab_size=256, max_position_embeddings=100), tmp_path)
    assert refusal(drafted_by(tmp_path, model)) == (
        f"draft_model is {tmp_path}: it was made for at most 100 tokens, and max_model_len is 256: set that to at "
        "most 100"
    )
    assert ModelRunner.load(drafted_by(tmp_path, model, max_model_len=100)).info.max_model_len == 100
    monkeypatch.setattr(tiny_models, "VOCAB_SIZE", 256)
    config = transformers.GPT2Config(vocab_size=256, n_positions=256, n_embd=64, n_layer=1, n_head=4)
    tiny_models.save(lambda: transformers.GPT2LMHeadModel(config), tmp_path)
    assert refusal(drafted_by(tmp_path, model)) == (
        f"draft_model is {tmp_path}: GPT2LMHeadModel does not run on the native decoder: take a draft that does"
    )
    for kind in ("first_layers", "eagle3"):
        assert refusal(settings(tmp_path, speculation=kind, draft_model=str(model) if kind == "eagle3" else "")) == (
            f"speculation is {kind}: GPT2LMHeadModel does not run on the native decoder, whose layers or states it "
            "needs; set it to draft_model or prompt_lookup"
        )


def test_a_draft_cache_that_cannot_be_allocated_is_refused_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(self: DecoderDraft, kv: KVTensors) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecoderDraft, "allocate", allocate)
    message = refusal(drafted_by(model, model))
    assert message.startswith("the draft's KV cache of ") and message.endswith(
        "lower num_blocks, kv_cache_memory_mb or gpu_memory_utilization"
    )


def test_tokens_of_a_failed_draft_do_not_count_as_cached(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner.load(drafted_by(model, model))
    drafter, loop, draft = runner._drafter, loop_of(runner), DecoderDraft.draft
    assert drafter is not None

    def fail(self: DecoderDraft, step: ForwardInput, *, is_first: bool) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DecoderDraft, "draft", fail)
    with pytest.raises(torch.OutOfMemoryError):
        loop.run(requests(prompts(1)))
    assert not drafter._is_cached.any() and not drafter._num_cached.any()
    monkeypatch.setattr(DecoderDraft, "draft", draft)


def test_a_draft_model_that_does_not_fit_is_refused_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_bytes = ModelRunner.load(settings(model)).info.weights_bytes
    monkeypatch.setattr(loader, "available_host_bytes", lambda: 2 * weights_bytes - 1)
    ModelRunner.load(settings(model))
    assert refusal(drafted_by(model, model)).startswith(f"draft_model is {model}: its weights and the model's need ")
