"""Adapters of an engine in the caller's process: greedy tokens equal those of models with merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from support.models.peft_folders import write_merged, write_peft
from support.models.tiny_models import llama, prompts, save
from tidewheel import LLM, RequestOptions, SamplingParams
from tidewheel.errors import InvalidRequest, NotFound, Unsupported

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NAMES = ("", "a", "b", "c")


class Models(NamedTuple):
    base: Path
    folder: Path  # of the adapters
    tokens: dict[str, list[list[int]]]  # of merged models, by adapter


def load(base: Path, **settings: object) -> LLM:
    return LLM(base, dtype="float32", num_blocks=128, skip_tokenizer_init=True, num_threads=1, **settings)


def tokens_of(llm: LLM, names: list[str]) -> list[list[int]]:
    """Generate from each prompt with each adapter, in one call."""
    given = [{"input_ids": prompt} for _ in names for prompt in PROMPTS]
    options = [RequestOptions(lora_name=name) for name in names for _ in PROMPTS]
    results = llm.generate(given, GREEDY, options, use_tqdm=False)
    assert [result.error for result in results] == [None] * len(given)
    return [result.token_ids for result in results]


PROMPTS = prompts(24, 1, 40)[:6]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("loras")
    save(llama, folder / "base")
    tokens = {}
    for seed, name in enumerate(NAMES):
        source = folder / "base"
        if name:
            adapter = write_peft(folder / name, folder / "base", seed=seed, strength=2.0)
            source = write_merged(folder / f"merged-{name}", folder / "base", adapter)
        with load(source) as llm:
            tokens[name] = tokens_of(llm, [""])
    assert len({str(found) for found in tokens.values()}) == len(NAMES)
    return Models(folder / "base", folder, tokens)


def modules(models: Models, names: str) -> str:
    return json.dumps({name: str(models.folder / name) for name in names})


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(4, None), (1, 1)])
def test_tokens_are_those_of_merged_models(models: Models, max_loras: int, max_cpu_loras: int | None) -> None:
    settings = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "max_num_seqs": 8}
    with load(models.base, enable_lora=True, lora_modules=modules(models, "abc"), **settings) as llm:
        for _ in range(2):  # the second time with cached blocks
            found = tokens_of(llm, ["a", "", "c", "b", "a"])
            assert found == [one for name in ("a", "", "c", "b", "a") for one in models.tokens[name]]


def test_a_name_and_what_is_wrong_with_it(models: Models) -> None:
    write_peft(models.folder / "e", models.base, rank=8)
    with load(models.base, enable_lora=True, max_lora_rank=4, lora_modules=modules(models, "aef")) as llm:
        with pytest.raises(NotFound, match=r"LoRA x is not supported, we currently support \['a', 'e', 'f'\]"):
            llm.generate({"input_ids": [5]}, GREEDY, lora_name="x", use_tqdm=False)
        given = {
            name: llm.generate({"input_ids": PROMPTS[0]}, GREEDY, lora_name=name, use_tqdm=False) for name in "aef"
        }
        assert given["a"][0].token_ids == models.tokens["a"][0]
        for name, kind, text in (("e", InvalidRequest, " r is 8, "), ("f", NotFound, "there is no folder ")):
            assert isinstance(error := given[name][0].error, kind) and text in error.message


def test_a_defective_adapter_ends_its_requests_alone(models: Models) -> None:
    write_peft(models.folder / "d", models.base)
    (models.folder / "d" / "adapter_model.safetensors").write_bytes(b"junk")
    with load(models.base, enable_lora=True, lora_modules=modules(models, "ad")) as llm:
        names = [RequestOptions(lora_name=name) for name in "da"]
        for _ in range(2):
            broken, other = llm.generate([{"input_ids": PROMPTS[0]}] * 2, GREEDY, names, use_tqdm=False)
            assert isinstance(broken.error, InvalidRequest) and broken.error.message.startswith("LoRA d: ")
            assert other.token_ids == models.tokens["a"][0]


def test_adapters_that_are_not_enabled(models: Models) -> None:
    with load(models.base) as llm, pytest.raises(Unsupported, match="Set enable_lora to true"):
        llm.generate({"input_ids": [5]}, GREEDY, lora_name="a", use_tqdm=False)
