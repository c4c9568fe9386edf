"""Real CUDA graphs: tokens or logits with and without them, what a launch waits for, and memory that is counted.

Tokens are compared in float32 alone; in bfloat16, where rounding may decide between two, logits are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.models import tiny_models
from support.runner.decode_workloads import KINDS, LOOPS, decoding, workload
from support.runner.graph_logits import decode_differences, sampled_logits
from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.batch import Int32Array, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import DTYPES
from tidewheel.models.trial_prompt import TOLERANCE, relative_difference
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep
from tidewheel.sampling import SamplingParams
from tidewheel_kernels.launch_config import decode_splits, multiprocessors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def gpu_config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint), dtype="float32", device="cuda", max_num_seqs=20, max_model_len=128, num_blocks=64,
        block_size=16, swap_space=0.01,
    )  # fmt: skip


@pytest.fixture(scope="module")
def graphed(gpu_config: EngineConfig) -> ModelRunner:
    return ModelRunner.load(gpu_config)


@pytest.fixture(scope="module")
def eager(gpu_config: EngineConfig) -> ModelRunner:
    return ModelRunner.load(dataclasses.replace(gpu_config, enforce_eager=True))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_tokens_are_those_of_a_runner_without_graphs(
    graphed: ModelRunner, eager: ModelRunner, kinds: list[object], loop: type[StepLoop]
) -> None:
    assert loop(graphed).run(workload(kinds)) == StepLoop(eager).run(workload(kinds))


@pytest.fixture(scope="module")
def in_bfloat16(gpu_config: EngineConfig) -> ModelRunner:
    return ModelRunner.load(dataclasses.replace(gpu_config, dtype="bfloat16"))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_logits_in_bfloat16_are_those_without_graphs(
    in_bfloat16: ModelRunner, kinds: list[SamplingParams], loop: type[StepLoop]
) -> None:
    with decode_differences() as differences:
        loop(in_bfloat16).run(workload(kinds))
    assert len(differences) >= 15
    assert all(difference <= TOLERANCE[torch.bfloat16] for difference in differences)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11, 20])
def test_every_size_has_its_graph(graphed: ModelRunner, eager: ModelRunner, count: int) -> None:
    assert StepLoop(graphed).run(decoding(count)) == StepLoop(eager).run(decoding(count))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_come_to_the_same_tokens(
    graphed: ModelRunner, eager: ModelRunner, mode: str, loop: type[StepLoop]
) -> None:
    expected = StepLoop(eager).run(workload(KINDS["filtered"], 8, seed=3))
    few = loop(graphed, num_blocks=10, num_host_blocks=16, preemption_mode=mode)
    assert few.run(workload(KINDS["filtered"], 8, seed=3)) == expected


class LongContext(NamedTuple):
    """Runners for four rows of up to 4,096 tokens, with graphs and without, and the prompts of such rows."""

    graphed: ModelRunner
    eager: ModelRunner
    prompts: list[Int32Array]

    @property
    def limit(self) -> float:
        return TOLERANCE[DTYPES[self.graphed.info.dtype]]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def long_context(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LongContext:
    folder = tmp_path_factory.mktemp("long-llama")
    tiny_models.save(lambda: tiny_models.llama(max_position_embeddings=4096), folder)
    config = EngineConfig(
        model=str(folder), dtype=request.param, device="cuda", max_num_seqs=4, num_blocks=512, block_size=16
    )
    prompts = [tiny_models.prompts(1, length, length, seed=length)[0] for length in (3000, 1500, 700, 20)]
    return LongContext(
        ModelRunner.load(config), ModelRunner.load(dataclasses.replace(config, enforce_eager=True)), prompts
    )


def test_logits_of_split_decodes_are_those_without_graphs(long_context: LongContext) -> None:
    """A graph has limits of splits for 4,096 keys, other steps for the longest row."""
    graphed = long_context.graphed
    keys = graphed.kv.layers[0].keys
    kv_heads, num_sms = keys.shape[2], multiprocessors(keys.device)
    assert all(decode_splits(4, kv_heads, length, num_sms).extra > 0 for length in (3000, 4096))
    with decode_differences() as differences:
        StepLoop(graphed).run([request(f"r{i}", prompt, 16) for i, prompt in enumerate(long_context.prompts)])
    assert len(differences) >= 12
    assert all(difference <= long_context.limit for difference in differences)


def test_logits_of_prompts_are_those_without_graphs(long_context: LongContext) -> None:
    """Chunks of 1,000 tokens attend to what pieces of graphs wrote before them."""
    logits = []
    for runner in (long_context.graphed, long_context.eager):
        with sampled_logits() as found:
            requests = [request(f"r{i}", prompt, 1) for i, prompt in enumerate(long_context.prompts)]
            StepLoop(runner, token_budget=1000, prefix_caching=False).run(requests)
        logits.append(torch.cat(found))
    assert len(logits[0]) == len(long_context.prompts)
    assert relative_difference(*logits) <= long_context.limit


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch raises when a launch waits for the device, as it does for pageable memory and values."""
    launch = ModelRunner.launch

    def watched(self: ModelRunner, batch: ScheduledBatch) -> PendingStep:
        with self._accelerator.no_waiting():
            return launch(self, batch)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    yield


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", ["graphed", "eager"])
def test_a_launch_waits_for_nothing(name: str, request: pytest.FixtureRequest) -> None:
    """Prompts, decodes, new rows, blocks and every stage of sampling."""
    runner = request.getfixturevalue(name)
    biased = SamplingParams(temperature=0.8, logit_bias={3: 5.0}, min_tokens=4)
    for loop in LOOPS.values():
        loop(runner).run(workload([biased, *KINDS["everything"]], words=((1, 2), (3,), (4, 5, 6))))


def test_memory_of_graphs_is_counted(graphed: ModelRunner, eager: ModelRunner) -> None:
    assert graphed.info.graph_bytes > 0
    assert eager.info.graph_bytes == 0


def test_the_cache_leaves_room_for_graphs(gpu_config: EngineConfig) -> None:
    """Sized from free memory: weights, graphs and cache stay within what they may take."""
    config = dataclasses.replace(gpu_config, num_blocks=None, gpu_memory_utilization=0.5, swap_space=0.0)
    runner = ModelRunner.load(config)
    StepLoop(runner, num_blocks=64).run([request("r", workload([GREEDY], 1)[0].prompt_token_ids, 4)])
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.55 * total
    assert runner.info.graph_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_unowned_memory_is_the_same_memory(dtype: torch.dtype) -> None:
    pool = CudaAccelerator(torch.device("cuda", torch.cuda.current_device())).graph_pool()
    tensor = torch.arange(24, device="cuda").view(3, 8).to(dtype)[:, 2:6]
    alias = pool.unowned(tensor)
    assert (alias.dtype, alias.shape, alias.stride(), alias.device, alias.data_ptr()) == (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.data_ptr(),
    )  # fmt: skip
    tensor += 1
    assert torch.equal(alias, tensor)
    before = torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.memory_allocated() < before
