"""Steps as graphs give the tokens that they give without: shown with graphs that are recorded on a CPU.

The recorded graphs freeze host values and control flow and read static buffers, as CUDA's do, and raise where one of
those could not be captured. Cut off from that are the kernels themselves, for which plain torch stands in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from support.models import tiny_models
from support.runner import capturable
from support.runner.decode_workloads import KINDS, LOOPS, PipelinedLoop, decoding, pairs_of, workload
from support.runner.graphed_runner import (
    DECODES,
    SIZES,
    as_new,
    graphed_tokens,
    graphs_of,
    launches,
    loaded,
    model_of,
    with_graphs,
    with_model,
)
from support.runner.recorded_graphs import NotCapturable, Watch
from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.batch import ScheduledBatch
from tidewheel.models.causal_lm import CausalLM, ForwardInput
from tidewheel.request import Request
from tidewheel.runner.inputs import NUM_SLOTS
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep
from tidewheel.runner.step_graphs import GraphSizes, StepGraphs, decode_sizes
from tidewheel.sampling import SamplingParams
from tidewheel_kernels import AttentionMetadata

pytestmark = pytest.mark.usefixtures("one_rounding")

loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


def test_sizes_cover_every_batch() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(256)[-3:] == [240, 248, 256]
    large = decode_sizes(1100)
    assert large[-1] == 1100
    assert all(0 < after - size <= 32 for size, after in itertools.pairwise(large))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> ModelRunner:
    """Without graphs, on the CPU's own operations."""
    return loaded(checkpoint)


@pytest.fixture(scope="module")
def captured(plain: ModelRunner) -> ModelRunner:
    return with_graphs(plain)


@pytest.fixture
def graphed(captured: ModelRunner) -> ModelRunner:
    return as_new(captured)


def replays(runner: ModelRunner) -> list[int]:
    """Of forward pass, greedy and drawn sampling of each size, the largest first, since the capture."""
    return [graph.num_replays - 1 for graph in graphs_of(runner)]


@loops
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_tokens_are_those_of_a_runner_without_graphs(
    plain: ModelRunner, graphed: ModelRunner, kinds: list[SamplingParams], loop: type[StepLoop]
) -> None:
    expected = StepLoop(plain).run(workload(kinds))
    assert graphed_tokens(graphed, workload(kinds), loop) == expected
    assert sum(replays(graphed)[::3]) >= 15


@loops
def test_preempted_requests_come_to_the_same_tokens(
    plain: ModelRunner, graphed: ModelRunner, loop: type[StepLoop]
) -> None:
    """Four requests of two blocks each grow to four, in a pool of eight: some leave their rows and come back."""

    def requests() -> list[Request]:
        prompts = tiny_models.prompts(4, 28, 32, seed=3)
        kinds = KINDS["filtered"]
        return [request(f"r{i}", prompt, 18, kinds[i % 3], seed=i) for i, prompt in enumerate(prompts)]

    expected = StepLoop(plain).run(requests())
    for mode in ("swap", "recompute"):
        again = requests()
        settings = {"num_blocks": 8, "num_host_blocks": 32, "preemption_mode": mode}
        assert graphed_tokens(graphed, again, loop, **settings) == expected
        assert sum(item.num_preemptions for item in again) > 0


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 11, 16])
def test_a_batch_takes_the_next_larger_size(plain: ModelRunner, graphed: ModelRunner, count: int) -> None:
    assert graphed_tokens(graphed, decoding(count)) == StepLoop(plain).run(decoding(count))
    size = min(size for size in SIZES if size >= count)
    used = dict(zip(reversed(SIZES), replays(graphed)[::3], strict=True))
    assert used == {other: 7 * (other == size) for other in SIZES}


@pytest.mark.parametrize(
    ("sampling", "greedy", "drawn"),
    [
        (GREEDY, 7, 0),
        (SamplingParams(temperature=1.0), 0, 7),
        (SamplingParams(temperature=0.0, logprobs=2), 0, 0),
        (SamplingParams(temperature=1.0, frequency_penalty=0.5), 0, 0),
        (SamplingParams(temperature=0.0, logit_bias={5: 1.0}), 0, 0),
    ],
    ids=["greedy", "drawn", "log-probabilities", "penalties", "biases"],
)
def test_sampling_is_a_graph_where_nothing_else_is_asked(
    graphed: ModelRunner, sampling: SamplingParams, greedy: int, drawn: int
) -> None:
    graphed_tokens(graphed, decoding(4, sampling))
    forward, *sampled = replays(graphed)[6:9]
    assert (forward, sampled) == (7, [greedy, drawn])


@pytest.mark.parametrize("make", [tiny_models.mistral, tiny_models.qwen2, tiny_models.qwen3])
def test_every_native_architecture_can_be_captured(
    make: Callable[[], tiny_models.PreTrainedModel], tmp_path: Path
) -> None:
    """With a sliding window, with biases, and with norms of queries and keys."""
    tiny_models.save(make, tmp_path)
    plain = loaded(tmp_path)
    assert graphed_tokens(with_graphs(plain), decoding(3)) == StepLoop(plain).run(decoding(3))


def test_a_step_says_how_it_ran(graphed: ModelRunner) -> None:
    assert launches(graphed, decoding(3)) == ["eager", *7 * ["graph"]]
    assert launches(graphed, decoding(2, SamplingParams(temperature=0.0, logprobs=2))) == ["eager", *7 * ["graph"]]
    assert launches(graphed, decoding(1), token_budget=1)[0] == "eager"


def test_a_step_with_a_prompt_runs_eagerly(graphed: ModelRunner) -> None:
    prompt = tiny_models.prompts(1, 20, 20)[0]
    graphed_tokens(graphed, [request("r", prompt, 1)])
    assert not any(replays(graphed))


def test_a_capture_fills_no_row_and_no_block(plain: ModelRunner) -> None:
    graphed = with_graphs(plain)
    assert all(cache.isnan().all() for layer in graphed.kv.layers for cache in layer[:2])
    info = graphed.info
    indices = torch.arange(info.max_num_seqs * (info.max_model_len + 1))
    assert not graphed._rows.tokens_at(indices).any()


def test_progress_and_memory_are_told(plain: ModelRunner) -> None:
    seen: list[tuple[str, float]] = []
    runner = with_graphs(plain)
    with capturable.installed():
        taken = runner.capture(GraphSizes([2, 1, 4]), lambda stage, fraction: seen.append((stage, fraction)))
    assert seen == [("graphs", 0.0), ("graphs", 1 / 3), ("graphs", 2 / 3), ("graphs", 1.0)]
    assert sum(map(sum, taken)) == runner._accelerator.pools[-1].num_bytes
    assert len(taken.decodes) == 3
    assert taken.decodes[0] > taken.decodes[2] > 0


@loops
def test_words_are_forbidden_alike(plain: ModelRunner, graphed: ModelRunner, loop: type[StepLoop]) -> None:
    free = StepLoop(plain).run(workload(KINDS["everything"]))
    words = pairs_of(free)
    expected = StepLoop(plain).run(workload(KINDS["everything"], words=words))
    assert expected != free
    assert graphed_tokens(graphed, workload(KINDS["everything"], words=words), loop) == expected


@loops
@pytest.mark.parametrize("kinds", ["filtered", "everything"])
def test_a_launch_of_decodes_reads_nothing(graphed: ModelRunner, kinds: str, loop: type[StepLoop]) -> None:
    """Nor does it bring anything to the device but through the staging buffer, or wait for more than a slot of it."""
    launch, num_watched = ModelRunner.launch, 0

    def watched(self: ModelRunner, batch: ScheduledBatch) -> PendingStep:
        nonlocal num_watched
        if batch.num_decodes < len(batch.rows):
            return launch(self, batch)
        num_watched += 1
        num_before = len(events)
        with Watch():
            pending = launch(self, batch)
        waits = {number for action, number in events[num_before:] if action == "synchronize"}
        assert waits <= set(range(NUM_SLOTS))
        return pending

    events = graphed._accelerator.events
    with mock.patch.object(ModelRunner, "launch", watched):
        graphed_tokens(graphed, workload(KINDS[kinds], words=((1, 2), (3,), (4, 5, 6))), loop)
    assert num_watched >= 15


# --- the proof can fail ---------------------------------------------------------------------------------------------


def faulty(plain: ModelRunner, fault: mock._patch[object]) -> list[list[int]]:
    with fault:
        return graphed_tokens(with_graphs(plain), workload(KINDS["filtered"], 8))


class Altered:
    """A model with a step of its own behind its forward pass."""

    is_capturable = True

    def __init__(self, model: CausalLM, alter: Callable[..., torch.Tensor]) -> None:
        self._model, self._alter = model, alter
        self.shape, self.weights_bytes = model.shape, model.weights_bytes

    def forward(self, step: ForwardInput) -> torch.Tensor:
        return self._alter(self._model.forward(step), step.positions[step.logit_indices], step.meta)


def altered_tokens(plain: ModelRunner, alter: Callable[..., torch.Tensor], *, graphs: bool = True) -> list[list[int]]:
    runner = with_model(plain, Altered(model_of(plain), alter), DECODES if graphs else None)
    requests = workload(KINDS["filtered"], 8)
    return graphed_tokens(runner, requests) if graphs else StepLoop(runner).run(requests)


READS = {
    "item": lambda tensor: tensor.sum().item(),
    "int": lambda tensor: int(tensor[0]),
    "bool": lambda tensor: bool((tensor > 0).any()),
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "nonzero": torch.nonzero,
    "mask": lambda tensor: tensor[tensor > 0],
    "constant": lambda tensor: tensor + torch.tensor([1]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_on_the_captured_path_is_found(plain: ModelRunner, read: Callable[[torch.Tensor], object]) -> None:
    def reading(logits: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        read(meta.seq_lens)
        return logits

    with pytest.raises(NotCapturable):
        altered_tokens(plain, reading)


def test_a_frozen_host_value_is_found(plain: ModelRunner) -> None:
    """A position that is counted on the host instead of read on the device."""
    steps = itertools.count()

    def counting(logits: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        return logits + torch.arange(logits.shape[1]).eq(next(steps) % 7) * 100.0

    def alike(logits: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        return logits + torch.arange(logits.shape[1]).eq(positions[:, None] % 7) * 100.0

    expected = altered_tokens(plain, alike, graphs=False)
    assert altered_tokens(plain, alike) == expected
    assert altered_tokens(plain, counting) != expected


def test_a_bound_that_is_too_low_is_found(plain: ModelRunner) -> None:
    init = StepGraphs.__init__

    def short(self: StepGraphs, *args: object, **lora: object) -> None:
        init(self, *args[:-1], 16, **lora)

    expected = StepLoop(plain).run(workload(KINDS["filtered"], 8))
    assert faulty(plain, mock.patch.object(StepGraphs, "__init__", short)) != expected


def test_an_input_outside_of_the_static_buffer_is_found(plain: ModelRunner) -> None:
    send = ModelRunner._send

    def elsewhere(self: ModelRunner, *args: object) -> object:
        sent = send(self, *args)
        self._sender._static.fill_(0)
        return sent

    expected = StepLoop(plain).run(workload(KINDS["filtered"], 8))
    assert faulty(plain, mock.patch.object(ModelRunner, "_send", elsewhere)) != expected


def test_tokens_that_are_read_after_the_next_step_are_found(plain: ModelRunner) -> None:
    """What a step answers must be its own copy: the next one overwrites where the tokens lay."""
    expected = StepLoop(plain).run(workload(KINDS["filtered"], 8))
    with mock.patch("tidewheel.runner.sampler._host_copies", lambda outputs, accelerator: outputs):
        assert graphed_tokens(with_graphs(plain), workload(KINDS["filtered"], 8), PipelinedLoop) != expected
