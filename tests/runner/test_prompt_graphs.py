"""Steps with prompts give the same tokens when graphs compute them between the attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from support.models import tiny_models
from support.runner import capturable
from support.runner.decode_workloads import KINDS, LOOPS, workload
from support.runner.graphed_runner import as_new, graphed_tokens, graphs_of, launches, loaded, with_graphs
from support.runner.recorded_graphs import NotCapturable
from support.runner.step_loop import StepLoop, request
from tidewheel.models.decoder import DecoderLayer
from tidewheel.runner.inputs import HostInputs, RowTable
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes, PromptGraph, prompt_sizes
from tidewheel.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_rounding")

loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
SIZES = GraphSizes([1, 4, 16], prompt_sizes(64))
KIND = KINDS["filtered"]


def test_sizes_reach_the_budget() -> None:
    assert prompt_sizes(6) == [16]
    assert prompt_sizes(16) == [16]
    assert prompt_sizes(129) == [16, 32, 48, 64, 80, 96, 112, 128, 192]
    assert prompt_sizes(2048)[-2:] == [1984, 2048]
    assert prompt_sizes(9000)[-2:] == [7936, 8192]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> ModelRunner:
    return loaded(checkpoint)


@pytest.fixture(scope="module")
def captured(plain: ModelRunner) -> ModelRunner:
    return with_graphs(plain, SIZES)


@pytest.fixture
def graphed(captured: ModelRunner) -> ModelRunner:
    return as_new(captured)


@pytest.fixture(scope="module")
def expected(plain: ModelRunner) -> list[list[int]]:
    return StepLoop(plain, token_budget=64).run(workload(KIND))


@pytest.fixture
def used() -> Iterator[list[tuple[int, int]]]:
    """Size of each graph of a prompt that runs, and tokens of its step."""
    seen: list[tuple[int, int]] = []
    logits = PromptGraph.logits

    def noted(graph: PromptGraph, meta: object, num_tokens: int, indices: torch.Tensor) -> torch.Tensor:
        seen.append((graph.num_tokens, num_tokens))
        return logits(graph, meta, num_tokens, indices)

    with mock.patch.object(PromptGraph, "logits", noted):
        yield seen


@loops
@pytest.mark.parametrize("kinds", ["filtered", "everything"])
def test_tokens_are_those_of_a_runner_without_graphs(
    plain: ModelRunner, graphed: ModelRunner, used: list[tuple[int, int]], kinds: str, loop: type[StepLoop]
) -> None:
    """Prompts alone, in chunks, behind cached blocks and beside decodes, of at most 64 tokens a step."""
    eager = StepLoop(plain, token_budget=64).run(workload(KINDS[kinds]))
    assert graphed_tokens(graphed, workload(KINDS[kinds]), loop, token_budget=64) == eager
    assert len({size for size, _ in used}) > 1
    assert all(size - 16 < num_tokens <= size for size, num_tokens in used)


def test_a_step_of_more_tokens_is_launched_kernel_by_kernel(plain: ModelRunner, used: list[tuple[int, int]]) -> None:
    eager = StepLoop(plain).run(workload(KIND))
    assert graphed_tokens(with_graphs(plain, GraphSizes([16], [16, 32])), workload(KIND)) == eager
    assert used
    assert max(num_tokens for _, num_tokens in used) <= 32


def test_a_step_says_how_it_ran(plain: ModelRunner) -> None:
    graphed = with_graphs(plain, GraphSizes([16], [16, 32]))
    prompt = tiny_models.prompts(1, 20, 20)[0]
    assert launches(graphed, [request("r", prompt, 3)]) == ["graphs of pieces", "graph", "graph"]


@pytest.mark.parametrize("make", [tiny_models.mistral, tiny_models.qwen2, tiny_models.qwen3])
def test_every_native_architecture_can_be_cut(
    make: Callable[[], tiny_models.PreTrainedModel], tmp_path: Path
) -> None:
    tiny_models.save(make, tmp_path)
    plain = loaded(tmp_path)
    eager = StepLoop(plain, token_budget=32).run(workload(KIND, 6))
    assert graphed_tokens(with_graphs(plain, SIZES), workload(KIND, 6), token_budget=32) == eager


def test_a_capture_fills_no_row_and_no_block(plain: ModelRunner) -> None:
    graphed = with_graphs(plain, SIZES)
    assert all(cache.isnan().all() for layer in graphed.kv.layers for cache in layer[:2])
    info = graphed.info
    assert not graphed._rows.tokens_at(torch.arange(info.max_num_seqs * (info.max_model_len + 1))).any()


def test_progress_and_memory_are_told(plain: ModelRunner) -> None:
    seen: list[float] = []
    runner = with_graphs(plain)
    with capturable.installed():
        taken = runner.capture(GraphSizes([1, 2], [16, 32]), lambda _stage, fraction: seen.append(fraction))
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert len(taken.prompts) == 2
    assert taken.prompts[0] > taken.prompts[1] > 0
    assert sum(map(sum, taken)) == runner._accelerator.pools[-1].num_bytes
    assert len(graphs_of(runner)) == 3 * 2 + (plain._steps.model.shape.num_layers + 1) * 2


def test_scored_prompts_are_computed_as_without_graphs(
    plain: ModelRunner, graphed: ModelRunner, used: list[tuple[int, int]]
) -> None:
    prompt = tiny_models.prompts(1, 20, 20)[0]
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    found = graphed_tokens(graphed, [request("r", prompt, 4, sampling)])
    assert found == StepLoop(plain).run([request("r", prompt, 4, sampling)])
    assert not used


# --- the proof can fail ---------------------------------------------------------------------------------------------


def faulty_tokens(runner: ModelRunner, fault: mock._patch[object]) -> list[list[int]]:
    with fault:
        return graphed_tokens(runner, workload(KIND), token_budget=64)


def test_padding_that_writes_a_block_is_found(graphed: ModelRunner, expected: list[list[int]]) -> None:
    pad = RowTable.padded_tokens

    def written(rows: RowTable, host: HostInputs, num_tokens: int) -> HostInputs:
        padded = pad(rows, host, num_tokens)
        return padded._replace(slot_mapping=padded.slot_mapping.clip(min=0))

    assert faulty_tokens(graphed, mock.patch.object(RowTable, "padded_tokens", written)) != expected


def test_an_attention_that_goes_elsewhere_is_found(graphed: ModelRunner, expected: list[list[int]]) -> None:
    attend = DecoderLayer.attend

    def elsewhere(layer: DecoderLayer, queries: torch.Tensor, meta: object, kv: object, out: object = None) -> object:
        return attend(layer, queries, meta, kv)

    assert faulty_tokens(graphed, mock.patch.object(DecoderLayer, "attend", elsewhere)) != expected


def test_a_read_in_a_piece_is_found(plain: ModelRunner) -> None:
    end = DecoderLayer.end

    def reading(layer: DecoderLayer, attended: torch.Tensor, residual: torch.Tensor, lora: object) -> object:
        attended.sum().item()
        return end(layer, attended, residual, lora)

    with mock.patch.object(DecoderLayer, "end", reading), pytest.raises(NotCapturable):
        with_graphs(plain, SIZES)
