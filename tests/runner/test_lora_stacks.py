"""Steps whose rows have different adapters give each row the tokens of its adapter merged into the base."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support.models import tiny_models
from support.models.peft_folders import deltas, write_peft
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
from support.runner.graph_logits import sampled_logits
from support.runner.step_loop import StepLoop, request
from tidewheel.batch import NewRow, ScheduledBatch
from tidewheel.errors import ConfigError
from tidewheel.runner import loading
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import LoraStacks
from tidewheel.runner.warm_up import sampling_batch
from tidewheel.sampling import SamplingParams
from tidewheel_kernels.lora import TILE, LoraGroups

loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


@pytest.fixture(scope="module")
def adapted(lora_folders: Folders) -> ModelRunner:
    return ModelRunner.load(settings(lora_folders.base))


@loops
@pytest.mark.parametrize("budget", [2048, 64, 20], ids=lambda budget: f"{budget} tokens a step")
def test_rows_of_a_step_have_their_own_adapters(
    adapted: ModelRunner, lora_folders: Folders, lora_answers: Answers, loop: type[StepLoop], budget: int
) -> None:
    """Prompts whole and in chunks beside decodes; 20 rows are more than a tile."""
    slots = {name: slot for slot, name in enumerate(ADAPTERS)}
    check_mixed(adapted, lora_folders, lora_answers, slots, loop=loop, token_budget=budget)


def test_the_adapters_change_every_answer(lora_answers: Answers) -> None:
    for number in range(4):
        assert len({tuple(answers[number]) for answers in lora_answers.values()}) == len(lora_answers)


def test_a_slot_is_loaded_again(adapted: ModelRunner, lora_folders: Folders, lora_answers: Answers) -> None:
    """Nothing of an earlier adapter stays, though the later one has other layers and a lower rank."""
    for name in ("widest", "attention", "last layer", "all"):
        check_mixed(adapted, lora_folders, lora_answers, {name: 2})
        check_mixed(adapted, lora_folders, lora_answers, {name: 2}, loads=False)


def test_more_rows_of_one_adapter_than_a_tile(
    adapted: ModelRunner, lora_folders: Folders, lora_answers: Answers
) -> None:
    small = settings(lora_folders.base, max_num_seqs=TILE + 4, max_loras=1)
    runner = ModelRunner.load(small)
    requests = [request(str(i), requests_of("all")[i % 4].prompt_token_ids, 8) for i in range(TILE + 4)]
    tokens = lora_tokens(
        runner, requests, {str(i): 0 for i in range(TILE + 4)}, [load(runner, 0, lora_folders.adapters["all"])]
    )
    assert tokens == [lora_answers["all"][i % 4] for i in range(TILE + 4)]


def prompts_step(slots: list[int], **more: object) -> ScheduledBatch:
    greedy = SamplingParams(temperature=0.0)
    prompts = [each.prompt_token_ids for each in requests_of("")]
    rows = [NewRow(i, request(str(i), prompt, 1), prompt, greedy) for i, prompt in enumerate(prompts)]
    counts = [len(prompt) for prompt in prompts]
    blocks = np.arange(3 * len(rows), dtype=np.int32)
    return sampling_batch(
        range(len(rows)), [0] * len(rows), counts, new_rows=tuple(rows), block_rows=blocks // 3,
        block_indices=blocks % 3, block_ids=blocks, lora_slots=np.array(slots, np.int32), **more,
    )  # fmt: skip


def test_rows_of_the_base_keep_their_bits(adapted: ModelRunner, lora_folders: Folders) -> None:
    """Beside rows with adapters, whichever they are."""
    loads = (load(adapted, 0, lora_folders.adapters["all"]), load(adapted, 1, lora_folders.adapters["widest"]))
    with sampled_logits() as found:
        for slots in ([], [-1, 0, -1, 1], [-1, 1, -1, -1]):
            adapted.run(prompts_step(slots, lora_loads=loads))
    base, first, second = found
    for other in (first, second):
        assert torch.equal(other[[0, 2]], base[[0, 2]])
        assert not torch.equal(other[1], base[1])
    assert torch.equal(second[3], base[3])


def test_a_row_with_an_adapter_keeps_its_bits_beside_others(adapted: ModelRunner, lora_folders: Folders) -> None:
    loads = (load(adapted, 0, lora_folders.adapters["all"]), load(adapted, 1, lora_folders.adapters["widest"]))
    with sampled_logits() as found:
        for slots in ([0, 0, -1, 1], [0, 1, 1, 1], [0, -1, -1, 1]):
            adapted.run(prompts_step(slots, lora_loads=loads))
    for other in found[1:]:
        assert torch.equal(other[[0, 3]], found[0][[0, 3]])


def test_scored_and_pooled_prompts(lora_folders: Folders, adapted: ModelRunner) -> None:
    merged = ModelRunner.load(settings(lora_folders.merged["all"], enable_lora=False))
    asked = SamplingParams(temperature=0.0, prompt_logprobs=2)
    prompt = requests_of("all")[0].prompt_token_ids

    def step(**lora: object) -> ScheduledBatch:
        rows = (
            NewRow(0, request("scored", prompt, 1, asked), prompt, asked),
            NewRow(1, request("pooled", prompt, 1, pooling="mean"), prompt, SamplingParams(temperature=0.0)),
        )
        blocks = np.arange(6, dtype=np.int32)
        return sampling_batch(
            [0, 1], [0, 0], [len(prompt)] * 2, new_rows=rows, block_rows=blocks // 3, block_indices=blocks % 3,
            block_ids=blocks, **lora,
        )  # fmt: skip

    of_base, of_merged = (runner.run(step()) for runner in (adapted, merged))
    loads = (load(adapted, 3, lora_folders.adapters["all"]),)
    found = adapted.run(step(lora_slots=np.array([3, 3], np.int32), lora_loads=loads))
    scores = [[top.logprob for top in one.prompt_logprobs[0]] for one in (found, of_merged, of_base)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert scores[0] != pytest.approx(scores[2], abs=1e-2)
    np.testing.assert_allclose(found.pooled[1], of_merged.pooled[1], rtol=1e-3, atol=1e-4)


FORMATS: dict[str, dict[str, object]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "deterministic": {"deterministic": True},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "pressure copy": {"pressure_quantization": "int8"},
}


@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
def test_layers_in_every_format_add_the_adapter(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "check_deterministic", lambda *_: None)
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", tmp_path / "base", rank=8, strength=5.0)
    runner = ModelRunner.load(settings(tmp_path / "base", **changes))
    if "pressure_quantization" in changes:
        runner._use("quantized")
    runner._lora.load([load(runner, 1, adapter)])
    added = deltas(adapter)
    groups = LoraGroups(torch.full((TILE,), -1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    groups.tokens[:2] = torch.tensor([0, 2])
    with torch.inference_mode():
        for linear in runner._steps.model.lora_linears:
            x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1)).to(linear.lora.dtype)
            delta = torch.cat([added[name] for name in linear.parts])
            plain, found = linear(x), linear(x, groups)
            assert torch.equal(found[1], plain[1])
            difference = found[[0, 2]].float() - plain[[0, 2]].float()
            exact = x[[0, 2]].float() @ delta.T
            assert (difference - exact).norm() < 0.02 * exact.norm(), linear.name


def test_rows_with_adapters_in_both_variants_of_the_weights(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", tmp_path / "base", rank=8)
    runner = ModelRunner.load(settings(tmp_path / "base", pressure_quantization="int8"))
    with sampled_logits() as found:
        runner.run(prompts_step([-1, 2, -1, 2], lora_loads=(load(runner, 2, adapter),)))
        runner.run(prompts_step([-1, 2, -1, 2], weights="quantized"))
        runner.run(prompts_step([], weights="quantized"))
    full, quantized, base = found
    assert torch.equal(quantized[[0, 2]], base[[0, 2]])
    assert (quantized[1] - full[1]).norm() < 0.1 * (quantized[1] - base[1]).norm()


def test_without_the_setting_nothing_is_made(lora_folders: Folders) -> None:
    runner = ModelRunner.load(settings(lora_folders.base, enable_lora=False))
    model = runner._steps.model
    assert LoraStacks.of(model) is runner._lora is None
    assert all(linear.lora is None for linear in model.lora_linears)
    assert (model.lora_bytes, runner.info.lora_bytes) == (0, 0)


def test_a_step_of_base_rows_adds_nothing(adapted: ModelRunner) -> None:
    with (
        mock.patch("tidewheel.models.linear.add_lora") as add,
        mock.patch.object(LoraStacks, "groups") as grouped,
    ):
        StepLoop(adapted).run(requests_of(""))
    assert not add.called
    assert not grouped.called


def test_other_models_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    with pytest.raises(ConfigError, match=r"enable_lora is true: GPT2LMHeadModel runs through transformers"):
        ModelRunner.load(settings(tmp_path))
