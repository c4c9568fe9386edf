"""Graphs of steps with adapters: what they hold, and that steps of base rows launch nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from support.runner import capturable
from support.runner.chosen_slots import (
    ADAPTERS,
    Answers,
    Folders,
    check_mixed,
    load,
    lora_tokens,
    requests_of,
    settings,
)
from support.runner.decode_workloads import LOOPS
from support.runner.graphed_runner import LOADED_SIZES, as_new, with_model
from support.runner.recorded_graphs import RecordedGraph, RecordingAccelerator
from support.runner.step_loop import StepLoop
from tidewheel.batch import no_ids
from tidewheel.models import decoder
from tidewheel.models.causal_lm import no_progress
from tidewheel.runner.loading import load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes, LoraStacks, StepGraphs, prompt_sizes
from tidewheel_kernels.lora.stacks import StaticLoraStack

pytestmark = pytest.mark.usefixtures("one_rounding")

SIZES = GraphSizes([1, 4, 16], prompt_sizes(64))
SLOTS = {name: slot for slot, name in enumerate(ADAPTERS)}


def graphed_runner(plain: ModelRunner, folder: Path) -> ModelRunner:
    with mock.patch.object(decoder, "lora_stack", StaticLoraStack):
        model = load_parts(settings(folder), no_progress).model
    return with_model(plain, model, SIZES)


@pytest.fixture(scope="module")
def captured(lora_folders: Folders) -> ModelRunner:
    return graphed_runner(ModelRunner.load(settings(lora_folders.base)), lora_folders.base)


@pytest.fixture
def graphed(captured: ModelRunner) -> ModelRunner:
    return as_new(captured)


def replays(runner: ModelRunner, *, with_adapters: bool) -> list[int]:
    """Return how often each of the graphs of steps with, or without adapters, which come first, was replayed."""
    graphs: Sequence[RecordedGraph] = runner._accelerator.pools[-1].graphs
    half = len(graphs) // 2
    return [graph.num_replays - 1 for graph in (graphs[:half] if with_adapters else graphs[half:])]


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("budget", [64, 20])
def test_graphs_give_the_tokens_of_merged_weights(
    graphed: ModelRunner, lora_folders: Folders, lora_answers: Answers, loop: type[StepLoop], budget: int
) -> None:
    with capturable.installed():
        check_mixed(graphed, lora_folders, lora_answers, SLOTS, loop=loop, token_budget=budget)
    assert sum(replays(graphed, with_adapters=True)) > 30


def test_a_slot_is_loaded_between_replays(graphed: ModelRunner, lora_folders: Folders, lora_answers: Answers) -> None:
    with capturable.installed():
        for name in ("widest", "last layer", "all"):
            check_mixed(graphed, lora_folders, lora_answers, {name: 3}, token_budget=64)


def test_steps_of_base_rows_replay_graphs_without_adapters(graphed: ModelRunner, lora_answers: Answers) -> None:
    with capturable.installed():
        assert lora_tokens(graphed, requests_of(""), {}, token_budget=64) == lora_answers[""]
    assert not any(replays(graphed, with_adapters=True))
    assert sum(replays(graphed, with_adapters=False)) > 10


def test_graphs_read_the_columns_of_each_step(
    graphed: ModelRunner, lora_folders: Folders, lora_answers: Answers
) -> None:
    """Without any tokens in them, replays compute the base."""
    loads = [load(graphed, slot, lora_folders.adapters[name]) for name, slot in SLOTS.items()]
    slots = {each.request_id: 1 for each in requests_of("widest")}
    groups = LoraStacks.groups
    empty = mock.patch.object(LoraStacks, "groups", lambda self, slots, size: groups(self, no_ids(), size))
    with capturable.installed(), empty:
        assert lora_tokens(graphed, requests_of("widest"), slots, loads, token_budget=64) == lora_answers[""]


def test_a_load_makes_both_and_counts_the_slots(
    lora_folders: Folders, accelerator: RecordingAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "lora_stack", StaticLoraStack)
    config = settings(lora_folders.base, max_num_batched_tokens=64)
    runner = ModelRunner.load(config)
    sizes = {key: [graph.num_rows for graph in graphs._decodes] for key, graphs in runner._graphs_of.items()}
    assert sizes == {("full", True): LOADED_SIZES, ("full", False): LOADED_SIZES}
    stacks = [linear.lora for linear in runner._steps.model.lora_linears]
    plain = ModelRunner.load(dataclasses.replace(config, enable_lora=False))
    assert runner.info.lora_bytes == sum(stack.num_bytes for stack in stacks) > 0
    assert runner.info.weights_bytes - plain.info.weights_bytes == runner.info.lora_bytes
    assert runner.info.graph_bytes == accelerator.pools[1].num_bytes > accelerator.pools[-1].num_bytes


def test_columns_have_the_place_that_graphs_read(graphed: ModelRunner, lora_folders: Folders) -> None:
    """Whatever else a step sends, up to the most tokens."""
    lora, rows = graphed._lora, graphed._rows
    for size in (1, 4, 16, 64):
        padding = {"lora": lora.groups(no_ids(), size), "inputs": rows.padding(0, size)}
        captured = [view.data_ptr() for view in graphed._sender(padding)["lora"]]
        again = graphed._sender({**padding, "inputs": rows.padding(min(size, 16)), "changes": [rows.padding(1).rows]})
        assert [view.data_ptr() for view in again["lora"]] == captured


def test_the_proof_of_replays_reads_the_right_half(graphed: ModelRunner, captured: ModelRunner) -> None:
    graphs = graphed._accelerator.pools[-1].graphs
    first = next(iter(graphed._graphs_of.values()))
    assert list(graphed._graphs_of) == [("full", True), ("full", False)]
    assert isinstance(first, StepGraphs)
    assert first._decodes[-1].forward.graph is graphs[0]
