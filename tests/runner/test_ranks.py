"""Ranks as threads give the tokens of one rank, in float32, whatever the load."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.long_runs import examples
from support.models import tiny_models
from support.runner import capturable
from support.runner.decode_workloads import KINDS, LOOPS, workload
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.random_loads import WITH_MARGIN, compared_loads
from support.runner.recorded_graphs import RecordedAllocator, RecordingAccelerator
from support.runner.step_loop import StepLoop, request
from support.runner.thread_ranks import ThreadRanks
from tidewheel.batch import RowError
from tidewheel.config import EngineConfig
from tidewheel.errors import InternalError
from tidewheel.request import Request
from tidewheel.runner import model_runner
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.rank_group import load_group
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


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_all_ways_of_sampling(case: Case, kinds: Sequence[SamplingParams], loop: type[StepLoop]) -> None:
    """Only the leader knows parameters and draws, and the followers compute on with its tokens."""
    case.ranks.poison()
    expected = loop(case.one, num_blocks=32, token_budget=60).run(workload(kinds))
    assert loop(case.ranks.leader, num_blocks=32, token_budget=60).run(workload(kinds)) == expected


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
    with capturable.products_of_onednn(), ThreadRanks(config, 2) as ranks:
        with monkeypatch.context() as eager:
            eager.setattr(model_runner, "accelerator_of", lambda device: None)
            one = ModelRunner.load(config)
        for seed in range(examples(6, 1000)):
            ranks.poison()
            compared_loads(one, ranks.leader, seed)
        replays = [sum(graph.num_replays - 1 for graph in each.pools[-1].graphs) for each in accelerators]
        assert replays[0] >= replays[1] > 100  # the leader's graphs sample too
