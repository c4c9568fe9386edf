"""An adapter gives the greedy tokens of transformers with its sum in the weights, in float32, beside any others."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu.parity import Divergence, first_divergence
from support.models import tiny_models
from support.models.peft_folders import write_merged, write_peft
from support.runner.step_loop import StepLoop, poison, request
from tidewheel.batch import Int32Array
from tidewheel.config import DType, EngineConfig
from tidewheel.lora import Lora
from tidewheel.models.lora_folder import read_lora
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner

NUM_TOKENS = 24
MAX_RANK = 8
MAX_SPACINGS = 16.0  # of bfloat16, by which rounding moves a logit of these models
COUNT = 6  # prompts of the base and of each adapter
ADAPTERS: dict[str, dict[str, object]] = {
    "all": {"rank": 4},
    "attention": {"rank": 8, "use_rslora": True, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "one-layer": {"rank": 1, "targets": ["v_proj", "down_proj"], "layers": [1]},
}


class Case(NamedTuple):
    runner: ModelRunner
    loras: dict[str, Lora]
    merged: dict[str, PreTrainedModel]  # by name of the adapter, or "base"; float32
    prompts: dict[str, list[Int32Array]]
    expected: dict[str, list[list[int]]]  # of `merged`

    def loop(self, *, max_loras: int = len(ADAPTERS), **settings: object) -> StepLoop:
        """Return a loop on a cache that is NaN wherever it has not written."""
        poison(self.runner)
        return StepLoop(self.runner, max_loras=max_loras, **settings)

    def request(self, name: str, number: int, *, is_base: bool = False) -> Request:
        lora = None if is_base else self.loras.get(name)
        return request(f"{name} {number}", self.prompts[name][number], NUM_TOKENS, lora=lora, cache_salt=name)

    def tokens(self, loop: StepLoop, *names: str, is_base: bool = False) -> dict[str, list[list[int]]]:
        """Run the requests of some adapters in turn, or the same ones without adapters."""
        pairs = [(name, number) for number in range(COUNT) for name in names]
        found = loop.run([self.request(*pair, is_base=is_base) for pair in pairs])
        return {name: [tokens for (of, _), tokens in zip(pairs, found, strict=True) if of == name] for name in names}

    def of(self, *names: str) -> dict[str, list[list[int]]]:
        return {name: self.expected[name] for name in names}


def made(name: str, folder: Path, dtype: DType) -> Case:
    """Make a model, its adapters, and prompts whose greedy tokens are clear in float32."""
    torch.set_num_threads(1)
    models = {"base": tiny_models.save(tiny_models.NATIVE[name], folder / "base")}
    for seed, (adapter, options) in enumerate(ADAPTERS.items()):
        write_peft(folder / adapter, folder / "base", seed=seed, **options)
        merged = write_merged(folder / f"merged {adapter}", folder / "base", folder / adapter)
        models[adapter] = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager").eval()
    candidates = tiny_models.prompts(COUNT + 6, 1, 40)
    clear = {
        adapter: tiny_models.clear_prompts(model, candidates, COUNT, NUM_TOKENS) for adapter, model in models.items()
    }  # fmt: skip
    config = EngineConfig(
        model=str(folder / "base"), dtype=dtype, device="cpu", max_num_seqs=32, num_blocks=256, block_size=16,
        num_threads=1, enable_lora=True, max_loras=len(ADAPTERS), max_lora_rank=MAX_RANK,
    )  # fmt: skip
    runner = ModelRunner.load(config)
    return Case(
        runner,
        {
            adapter: Lora(
                adapter, version, folder / adapter, read_lora(folder / adapter, runner._steps.model, MAX_RANK)
            )
            for version, adapter in enumerate(ADAPTERS)
        },
        models,
        {adapter: prompts for adapter, (prompts, _) in clear.items()},
        {adapter: tokens for adapter, (_, tokens) in clear.items()},
    )


@pytest.fixture(scope="module", params=tiny_models.NATIVE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param), "float32")


@pytest.fixture(scope="module", params=["llama", "qwen3-tied"])
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param), "bfloat16")


@pytest.mark.parametrize("name", ADAPTERS)
def test_one_adapter_gives_the_tokens_of_merged_weights(case: Case, name: str) -> None:
    assert case.tokens(case.loop(), name) == case.of(name)
    assert case.expected[name] != case.expected["base"]


def test_one_request_alone(case: Case) -> None:
    """Its steps may run in one C call."""
    for name in ("base", *ADAPTERS):
        found = case.loop().run([case.request(name, 0)])
        assert found == case.expected[name][:1]


def test_base_and_adapters_in_one_step(case: Case) -> None:
    names = "base", *ADAPTERS
    assert case.tokens(case.loop(), *names) == case.of(*names)


def test_base_and_adapters_with_chunked_prefill(case: Case) -> None:
    names = "base", *ADAPTERS
    assert case.tokens(case.loop(token_budget=37), *names) == case.of(*names)


def test_base_and_adapters_with_preemption(case: Case) -> None:
    names, loop = ("base", *ADAPTERS), case.loop(num_blocks=16)
    assert case.tokens(loop, *names) == case.of(*names)
    assert loop.scheduler.stats().num_preemptions > 0


def test_fewer_slots_than_adapters(case: Case) -> None:
    """Adapters take turns in a slot, which is filled anew."""
    names = "base", *ADAPTERS
    assert case.tokens(case.loop(max_loras=1), *names) == case.of(*names)


def test_one_prompt_of_all(case: Case) -> None:
    """Each adapter has keys and values of its own, in the same step."""

    def requests() -> list[Request]:
        prompt = case.prompts["all"][0]
        return [
            request(name, prompt, NUM_TOKENS, lora=case.loras.get(name), cache_salt=name)
            for name in ("base", *ADAPTERS)
        ]

    alone = [case.loop().run([each])[0] for each in requests()]
    assert case.loop().run(requests()) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_base_rows_have_the_tokens_of_steps_without_adapters(rounded: Case) -> None:
    """In bfloat16, where other products for the base's rows would show."""
    names = "base", *ADAPTERS
    expected = rounded.tokens(rounded.loop(), *names, is_base=True)
    found = rounded.tokens(rounded.loop(), *names)
    assert found["base"] == expected["base"]
    assert all(found[name] != expected[name] for name in ADAPTERS)


@torch.inference_mode()
def divergences(case: Case, name: str, answers: list[list[int]]) -> list[Divergence]:
    """Compare answers with the logits of the merged weights in float32."""
    found = []
    for prompt, tokens in zip(case.prompts[name], answers, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *tokens[:-1]]])
        logits = case.merged[name](ids).logits[0, len(prompt) - 1 :].float()
        found.append(first_divergence(logits, tokens, torch.bfloat16))
    return [one for one in found if one is not None]


def test_in_bfloat16_tokens_part_only_where_rounding_decides(rounded: Case) -> None:
    answers = rounded.tokens(rounded.loop(), "base", *ADAPTERS)
    for name, tokens in answers.items():
        assert all(one.spacings < MAX_SPACINGS for one in divergences(rounded, name, tokens))
    assert all(one.spacings > MAX_SPACINGS for one in divergences(rounded, "all", answers["base"]))
