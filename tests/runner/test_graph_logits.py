"""In bfloat16 the logits of graphs are compared, not tokens; here with graphs that are recorded on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from support.models import tiny_models
from support.runner.decode_workloads import KINDS, LOOPS, workload
from support.runner.graph_logits import decode_differences, sampled_logits
from support.runner.graphed_runner import as_new, graphed_tokens, graphs_of, loaded, with_graphs
from support.runner.step_loop import StepLoop, request
from tidewheel.models.trial_prompt import TOLERANCE, relative_difference
from tidewheel.request import Request
from tidewheel.runner.inputs import HostInputs, RowTable
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes, prompt_sizes
from tidewheel.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_rounding")

LIMIT = TOLERANCE[torch.bfloat16]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> ModelRunner:
    return loaded(checkpoint, "bfloat16")


@pytest.fixture(scope="module")
def captured(plain: ModelRunner) -> ModelRunner:
    return with_graphs(plain, GraphSizes([1, 4, 16], prompt_sizes(64)))


@pytest.fixture
def graphed(captured: ModelRunner) -> ModelRunner:
    return as_new(captured)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_decodes(graphed: ModelRunner, kinds: Sequence[SamplingParams], loop: type[StepLoop]) -> None:
    with decode_differences() as differences:
        graphed_tokens(graphed, workload(kinds), loop)
    assert len(differences) >= 15
    assert all(difference <= LIMIT for difference in differences)


def prompts() -> list[Request]:
    """Return prompts of several chunks and of a part of one, from whose logits one token is drawn."""
    return [request(f"r{i}", ids, 1) for i, ids in enumerate(tiny_models.prompts(12, 1, 100))]


def test_prompts(plain: ModelRunner, graphed: ModelRunner) -> None:
    with sampled_logits() as expected:
        StepLoop(plain, token_budget=64).run(prompts())
    with sampled_logits() as found:
        graphed_tokens(graphed, prompts(), token_budget=64)
    differences = [relative_difference(*pair) for pair in zip(found, expected, strict=True)]
    assert all(difference <= LIMIT for difference in differences)
    assert sum(graph.num_replays - 1 for graph in graphs_of(graphed)) > 10


def test_a_key_too_few_is_found(graphed: ModelRunner) -> None:
    """The bound is not so wide that a fault fits in."""
    pad = RowTable.padded

    def shortened(rows: RowTable, host: HostInputs, num_rows: int) -> HostInputs:
        return pad(rows, host._replace(seq_lens=host.seq_lens - 1), num_rows)

    with decode_differences() as differences, mock.patch.object(RowTable, "padded", shortened):
        graphed_tokens(graphed, workload(KINDS["greedy"], 3))
    assert max(differences) > LIMIT
