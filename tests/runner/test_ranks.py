"""Ranks as threads give the tokens of one rank, in float32, whatever the load."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedModel

from support.long_runs import examples
from support.models import tiny_models
from support.runner import capturable
from support.runner.chosen_slots import ADAPTERS, MAX_LORAS, MAX_RANK, Answers, Folders, check_mixed, lora_tokens
from support.runner.decode_workloads import KINDS, LOOPS, workload
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.random_loads import WITH_MARGIN, compared_loads
from support.runner.recorded_graphs import RecordedAllocator, RecordingAccelerator
from support.runner.step_loop import GREEDY, StepLoop, request
from support.runner.thread_ranks import ThreadRanks
from tidewheel.batch import RowError, StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InternalError
from tidewheel.grammar import Grammar, RowGrammar
from tidewheel.request import Request
from tidewheel.runner import model_runner
from tidewheel.runner.grammar_compiler import GrammarCompiler, to_source
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.rank_group import load_group
from tidewheel.runner.sampling_plan import SamplingPlan
from tidewheel.runner.step_graphs import GraphSizes
from tidewheel.sampling import SamplingParams

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_models.llama,
    "llama-tied": partial(tiny_models.llama, tie_word_embeddings=True),
    "llama-biases": partial(tiny_models.llama, attention_bias=True, mlp_bias=True),
    "mistral-window": tiny_models.mistral,
    "qwen2": tiny_models.qwen2,
    "qwen2-window": partial(tiny_models.qwen2, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3-tied": partial(tiny_models.qwen3, tie_word_embeddings=True),
}


class Case(NamedTuple):
    one: ModelRunner
    ranks: ThreadRanks


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> RowGrammar:
    """Grammar of some words, whose letters are the tokens 0 to 25."""
    vocabulary = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("letters")
    backend.save(str(folder / "tokenizer.json"))
    compiler = GrammarCompiler(folder, tiny_models.VOCAB_SIZE)
    words = Grammar.choice(["abc", "abde", "xyz", "xylophone"])
    return RowGrammar(compiler.compile(to_source(words), "choice"), (30, 31))


def settings(folder: Path, **changes: object) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", device="cpu", max_num_seqs=16, num_blocks=64, block_size=16,
        num_threads=1, swap_space=0.01, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[(name, 4 if i % 2 else 2) for i, name in enumerate(MODELS)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, num_ranks = request.param
    folder = tmp_path_factory.mktemp(name)
    torch.set_num_threads(1)
    tiny_models.save(MODELS[name], folder)
    with ThreadRanks(settings(folder), num_ranks) as ranks:
        yield Case(ModelRunner.load(settings(folder)), ranks)


def test_random_loads_have_the_tokens_of_one_rank(case: Case) -> None:
    totals = Counter[str]()
    for seed in range(examples(6, 200)):
        case.ranks.poison()
        totals += compared_loads(case.one, case.ranks.leader, seed)
    assert min(totals["preempted"], totals["swapped"], totals["hits"]) > 0


def test_random_loads_on_processes(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.llama, tmp_path)
    ranked = load_group(dataclasses.replace(settings(tmp_path), tensor_parallel_size=2), None)
    try:
        one = ModelRunner.load(settings(tmp_path))
        for seed in range(20):
            compared_loads(one, ranked, seed)
    finally:
        ranked.close()


def test_adapters_on_processes(lora_folders: Folders, lora_answers: Answers) -> None:
    config = settings(lora_folders.base, enable_lora=True, max_loras=MAX_LORAS, max_lora_rank=MAX_RANK)
    ranked = load_group(dataclasses.replace(config, tensor_parallel_size=2), None)
    try:
        check_mixed(ranked, lora_folders, lora_answers, {name: slot for slot, name in enumerate(ADAPTERS)})
        check_mixed(ranked, lora_folders, lora_answers, {"all": 1, "attention": 0})
        ranked.check()
        with pytest.raises(ConfigError, match="nowhere"):
            ranked.read_lora(lora_folders.base / "nowhere")
    finally:
        ranked.close()


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_all_ways_of_sampling(case: Case, kinds: Sequence[SamplingParams], loop: type[StepLoop]) -> None:
    """Only the leader knows parameters and draws, and the followers compute on with its tokens."""
    case.ranks.poison()
    expected = loop(case.one, num_blocks=32, token_budget=60).run(workload(kinds))
    assert loop(case.ranks.leader, num_blocks=32, token_budget=60).run(workload(kinds)) == expected


def random_sampling(random: np.random.Generator) -> SamplingParams:
    """Return draws, greedy or filtered; one in five changes logits or wants log-probabilities."""
    changes: dict[str, object] = {}
    if random.random() < 0.2:
        options = ({"repetition_penalty": 1.3}, {"logit_bias": {5: 9.0}}, {"min_tokens": 3}, {"logprobs": 3})
        changes = dict(options[int(random.integers(len(options)))])
    return SamplingParams(
        temperature=float(random.choice([0, 0.3, 1, 2])), top_k=int(random.choice([0, 0, 4, 300])),
        top_p=float(random.choice([1, 0.5, 0.95])), min_p=float(random.choice([0, 0, 0.1])), **changes,
    )  # fmt: skip


def random_draws(seed: int, grammar: RowGrammar) -> list[Request]:
    random, requests = np.random.default_rng(seed), []
    plain = bool(random.random() < 0.3)  # all greedy
    for number, prompt in enumerate(tiny_models.prompts(int(random.integers(1, 7)), 1, 40, seed=seed)):
        sampling = GREEDY if plain else random_sampling(random)
        fields = {"grammar": grammar} if not plain and not sampling.min_tokens and random.random() < 0.1 else {}
        first = request(f"r{number}", prompt, 10, sampling, seed=seed * 100 + number, stop_token_ids=(9,), **fields)
        others = range(int(random.integers(0, 3)))
        requests += [first, *(request(f"r{number}.{i}", prompt, 8, sampling, seed=i, leader=first) for i in others)]
    return requests


def test_draws_are_those_of_whole_logits(case: Case, letters: RowGrammar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is gathered of them: tokens and log-probabilities are equal, not just near."""
    width, totals = tiny_models.VOCAB_SIZE // len(case.ranks.runners), Counter[str]()

    def answers(seed: int) -> tuple[list[list[int]], list[object]]:
        loop, logprobs = StepLoop(case.ranks.leader, token_budget=60), []
        apply = loop.scheduler.apply

        def noted(*arguments: Any) -> StepOutputs:
            logprobs.append(arguments[1].logprobs)
            return apply(*arguments)

        loop.scheduler.apply = noted
        return loop.run(random_draws(seed, letters)), logprobs

    for seed in range(examples(20, 500)):
        begin = len(case.ranks.calls[0])
        found = answers(seed)
        shapes = [shape for name, shape, _ in case.ranks.calls[0][begin:] if name == "all_gather"]
        totals += Counter("all" if shape[-1] == width else "some" for shape in shapes)
        with monkeypatch.context() as whole:
            whole.setattr(SamplingPlan, "logit_use", "all")
            assert found == answers(seed), seed
    assert min(totals["all"], totals["some"]) > 20


def test_prompts_are_scored_and_pooled(case: Case) -> None:
    def answers(runner: ModelRunner) -> list[Request]:
        prompts = tiny_models.prompts(4, 20, 60, seed=3)
        scored = SamplingParams(temperature=0.0, prompt_logprobs=2)
        requests = [
            request(f"r{i}", prompt, 4, scored if i % 2 else WITH_MARGIN, pooling="" if i % 2 else "mean")
            for i, prompt in enumerate(prompts)
        ]
        StepLoop(runner, token_budget=50).run(requests)
        return requests

    for one, many in zip(answers(case.one), answers(case.ranks.leader), strict=True):
        assert [entry.rank for entry in one.prompt_logprobs] == [entry.rank for entry in many.prompt_logprobs]
        assert np.allclose(*([entry.logprob for entry in each.prompt_logprobs] for each in (one, many)), atol=1e-4)
        assert one.pooled is None or np.allclose(one.pooled, many.pooled, atol=1e-3)


def test_a_request_that_cannot_be_launched_leaves_the_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core repeats the step without the row; followers have run its block copies, and no step of it."""
    prompts = tiny_models.prompts(2, 20, 30, seed=5)
    batch_of = StepLoop(case.ranks.leader)
    requests = [request(f"r{i}", prompt, 4) for i, prompt in enumerate(prompts)]
    for item in requests:
        batch_of.scheduler.add_group([item], 0.0)
    batch = batch_of.scheduler.schedule(0.0)
    assert batch is not None
    with monkeypatch.context() as patched:
        patched.setattr(case.ranks.leader._sampling, "_fill", lambda new: 1 / 0)
        with pytest.raises(RowError):
            case.ranks.leader.launch(batch)
    batch_of.scheduler.apply(batch, case.ranks.leader.run(batch), 0.0)
    batch_of.run([])
    assert [item.output_token_ids for item in requests] == StepLoop(case.one).run(
        [request(f"r{i}", prompt, 4) for i, prompt in enumerate(prompts)]
    )


def test_ranks_hold_parts_and_the_least_number_of_blocks(case: Case) -> None:
    infos = [runner.info for runner in case.ranks.runners]
    assert len({info.num_blocks for info in infos}) == 1
    assert all(info.weights_bytes < 0.75 * case.one.info.weights_bytes for info in infos)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_short_of_memory_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """A step is not repeated, as one rank does: the other ranks are inside of it."""
    tiny_models.save(tiny_models.llama, tmp_path)
    ranks = ThreadRanks(settings(tmp_path), 2)

    def fail(*_: object) -> None:
        ranks.exchange.abort()  # as the end of a process does
        raise MemoryError

    monkeypatch.setattr(ranks.runners[victim]._steps.model.layers[1].mlp, "down", fail)
    with pytest.raises(InternalError):
        StepLoop(ranks.leader).run([request("r", tiny_models.prompts(1, 20, 20)[0], 4)])
    if victim:
        with pytest.raises(InternalError, match="MemoryError"):
            ranks.leader.check()
    else:
        ranks.close()


@pytest.fixture(scope="module", params=[2, 4])
def lora_ranks(request: pytest.FixtureRequest, lora_folders: Folders) -> Iterator[ThreadRanks]:
    config = settings(lora_folders.base, enable_lora=True, max_loras=MAX_LORAS, max_lora_rank=MAX_RANK)
    with ThreadRanks(config, request.param) as ranks:
        yield ranks


def test_rows_have_their_own_adapters(lora_ranks: ThreadRanks, lora_folders: Folders, lora_answers: Answers) -> None:
    """Also after slots were loaded anew, and in chunks."""
    names = list(ADAPTERS)
    for order in (names, names[::-1]):
        slots = {name: slot for slot, name in enumerate(order)}
        lora_ranks.poison()
        check_mixed(lora_ranks.leader, lora_folders, lora_answers, slots, token_budget=20)


def test_ranks_forget_what_rank_0_has_dropped(lora_ranks: ThreadRanks, lora_folders: Folders) -> None:
    runner = lora_ranks.leader
    StepLoop(runner).run([request("first", tiny_models.prompts(1, 4, 4)[0], 2)])
    gc.collect()
    lora_tokens(runner, [request("second", tiny_models.prompts(1, 4, 4)[0], 2)], {})
    assert lora_ranks.loras_of_followers == [{}] * (len(lora_ranks.runners) - 1)
    kept, _dropped = (runner.read_lora(folder) for folder in list(lora_folders.adapters.values())[:2])
    assert [len(loras) for loras in lora_ranks.loras_of_followers] == [2] * (len(lora_ranks.runners) - 1)
    del _dropped
    lora_tokens(runner, [request("third", tiny_models.prompts(1, 4, 4)[0], 2)], {})
    assert [list(loras) for loras in lora_ranks.loras_of_followers] == [[kept.number]] * len(lora_ranks.runners[1:])


def test_all_ranks_refuse_what_one_cannot_read(
    lora_ranks: ThreadRanks, lora_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(lora_folders.adapters["all"], tmp_path / "adapter")
    last, read = lora_ranks.runners[-1], ModelRunner.read_lora

    def read_failing(runner: ModelRunner, path: Path) -> object:
        if runner is last:
            raise MemoryError("no room")
        return read(runner, path)

    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"adapter cannot be read: no room$"):
        patched.setattr(ModelRunner, "read_lora", read_failing)
        lora_ranks.leader.read_lora(folder)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/nowhere/adapter_config.json "):
        lora_ranks.leader.read_lora(tmp_path / "nowhere")
    assert lora_ranks.leader.read_lora(folder).rank == ADAPTERS["all"]["rank"]


def test_recorded_graphs_call_collectives_in_the_order_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: RecordingAccelerator
) -> None:
    """Decodes and prompts replay graphs that hold collectives; a rank that waits for another fails the test."""
    tiny_models.save(tiny_models.llama, tmp_path)
    accelerators: list[RecordingAccelerator] = []
    monkeypatch.setattr(RecordedAllocator, "installed", lambda _self: nullcontext())  # it patches for one thread
    monkeypatch.setattr(model_runner, "graph_sizes", lambda config, parts: GraphSizes(LOADED_SIZES, [16, 48]))
    monkeypatch.setattr(
        model_runner, "accelerator_of", lambda device: accelerators.append(RecordingAccelerator()) or accelerators[-1]
    )
    config = settings(tmp_path, max_model_len=128)
    with capturable.products_of_torch(), ThreadRanks(config, 2) as ranks:
        with monkeypatch.context() as eager:
            eager.setattr(model_runner, "accelerator_of", lambda device: None)
            one = ModelRunner.load(config)
        for seed in range(examples(6, 1000)):
            ranks.poison()
            compared_loads(one, ranks.leader, seed)
        replays = [sum(graph.num_replays - 1 for graph in each.pools[-1].graphs) for each in accelerators]
        assert replays[0] == replays[1] > 100
