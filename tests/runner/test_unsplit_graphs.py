"""Decodes of which the host sees that none is split take a second graph, which has no splits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from support.models import tiny_models
from support.runner import capturable
from support.runner.decode_workloads import KINDS, LOOPS, workload
from support.runner.graphed_runner import graphed_tokens, graphs_of, loaded, model_of, with_graphs, with_model
from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.batch import ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import CausalLM, ForwardInput
from tidewheel.runner.loading import graph_sizes
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import DecodeGraph, GraphSizes, StepGraphs, decode_sizes, unsplit_sizes
from tidewheel_kernels import launch_config
from tidewheel_kernels.launch_config import decode_splits

pytestmark = pytest.mark.usefixtures("one_rounding")

SIZES = GraphSizes([1, 2, 4, 8, 16], (), [8, 16])
META = torch.device("meta")


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let 16 keys be enough for a split, as the contexts here are short."""
    monkeypatch.setattr(launch_config, "MIN_KEYS_PER_SPLIT", 16)
    monkeypatch.setattr(launch_config, "MIN_KEYS_PER_SPLIT_OF_MANY", 16)
    decode_splits.cache_clear()
    yield
    decode_splits.cache_clear()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> ModelRunner:
    return loaded(checkpoint)


def finds(runner: ModelRunner, prompt_lens: list[int], output_lens: list[int]) -> list[tuple[list[int], bool]]:
    """Return the lengths of each step that a graph ran, and whether it was one without splits."""
    seen: list[tuple[list[int], bool]] = []
    find = StepGraphs.find_decodes

    def noted(self: StepGraphs, batch: ScheduledBatch) -> DecodeGraph | None:
        graph = find(self, batch)
        if graph is not None:
            seen.append(((batch.start_positions + 1).tolist(), graph is self._unsplit.get(graph.num_rows)))
        return graph

    prompts = [tiny_models.prompts(1, length, length, seed=i)[0] for i, length in enumerate(prompt_lens)]
    pairs = zip(prompts, output_lens, strict=True)
    with mock.patch.object(StepGraphs, "find_decodes", noted):
        graphed_tokens(runner, [request(f"r{i}", *pair, GREEDY) for i, pair in enumerate(pairs)])
    return seen


def test_the_second_graph_is_taken_until_a_row_is_split(plain: ModelRunner) -> None:
    """Of 7 or 8 rows, one is split that is longer than a fourth of all keys."""
    seen = finds(with_graphs(plain, SIZES), [*[20] * 7, 50], [7] * 8)
    assert [unsplit for _, unsplit in seen] == [False, False, True, True, True, True]
    assert seen[1] == ([22] * 7 + [52], False) and seen[2] == ([23] * 7 + [53], True)


def test_rows_that_leave_or_stay_alone_decide_anew(plain: ModelRunner) -> None:
    seen = finds(with_graphs(plain, SIZES), [*[20] * 7, 90], [9] * 7 + [4])
    assert [(len(lengths), unsplit) for lengths, unsplit in seen] == [(8, False)] * 3 + [(7, True)] * 5
    few = finds(with_graphs(plain, SIZES), [20] * 4, [5] * 4)  # a size without a second graph
    assert [unsplit for _, unsplit in few] == [False] * 4


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", ["greedy", "filtered", "everything"])
def test_tokens_are_the_same(plain: ModelRunner, kinds: str, loop: type[StepLoop]) -> None:
    graphed = with_graphs(plain, SIZES)
    expected = StepLoop(plain).run(workload(KINDS[kinds]))
    assert graphed_tokens(graphed, workload(KINDS[kinds]), loop) == expected
    forwards = [graph.num_replays - 1 for graph in graphs_of(graphed)[::3]]
    assert sum(forwards[:2]) > 0 and sum(forwards[5:]) > 0  # of 16 and 8 rows, with splits and without


def test_the_second_graph_is_captured_without_splits(plain: ModelRunner) -> None:
    model, seen = model_of(plain), []
    forward = type(model).forward

    def noted(self: CausalLM, step: ForwardInput) -> torch.Tensor:
        seen.append((step.meta.num_seqs, step.meta.may_split))
        return forward(self, step)

    with mock.patch.object(type(model), "forward", noted):
        runner = with_model(plain, model, SIZES)
    graphs = [(size, True) for size in (16, 8, 4, 2, 1)] + [(16, False), (8, False)]
    assert seen == [graph for graph in graphs for _ in range(2)]  # the run before the capture, and the capture
    assert len(graphs_of(runner)) == 3 * len(graphs)


def test_memory_and_progress_count_the_second_graphs(plain: ModelRunner) -> None:
    seen: list[float] = []
    runner = with_graphs(plain, SIZES)
    with capturable.installed():
        taken = runner.capture(GraphSizes([4, 8], (), [8]), lambda _, fraction: seen.append(fraction))
    assert seen == [0.0, 1 / 3, 2 / 3, 1.0]
    assert [len(part) for part in taken] == [2, 0, 1] and min(*taken.decodes, *taken.unsplit) > 0
    assert sum(map(sum, taken)) == runner._accelerator.pools[-1].num_bytes


def test_large_sizes_of_long_contexts_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    decode_splits.cache_clear()
    sizes = decode_sizes(256)
    assert unsplit_sizes(sizes, 8, 40_960, META) == [size for size in sizes if size >= 64]
    assert len(unsplit_sizes(sizes, 8, 40_960, META)) == 25
    assert unsplit_sizes(sizes, 8, 1024, META) == []  # nothing is ever split
    assert unsplit_sizes(decode_sizes(48), 8, 40_960, META) == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_engines_have_no_second_graphs(deterministic: bool) -> None:
    config = EngineConfig(model="any", deterministic=deterministic, max_num_seqs=128)
    model = SimpleNamespace(shape=SimpleNamespace(num_kv_heads=8))
    parts = SimpleNamespace(device=META, model=model, info=SimpleNamespace(max_model_len=4096, max_num_seqs=128))
    assert graph_sizes(config, parts) == GraphSizes(
        decode_sizes(128), (), () if deterministic else [*range(64, 129, 8)]
    )
