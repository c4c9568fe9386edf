"""An engine with an EAGLE-3 head gives the answers of one without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.models.eagle3_folders import write_eagle3
from support.models.tiny_models import llama, prompts, save
from support.scheduler.always_drafts import always_drafts
from tidewheel import LLM, SamplingParams
from tidewheel.errors import ConfigError

SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=list(range(0, 384, 16))),
]


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    with always_drafts():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save(partial(llama, num_hidden_layers=8), target)
    return write_eagle3(tmp_path_factory.mktemp("head"), model)


def load(target: Path, **settings: object) -> LLM:
    return LLM(target, dtype="float32", num_blocks=96, skip_tokenizer_init=True, num_threads=1, **settings)


def answers(llm: LLM) -> list[tuple[list[int], str | None]]:
    """Return the tokens of each prompt with each sampling, and why they ended."""
    given = [{"input_ids": ids} for ids in prompts(8, 1, 90) for _ in SAMPLINGS]
    results = llm.generate(given, SAMPLINGS * 8, use_tqdm=False)
    assert [result.error for result in results] == [None] * len(given)
    return [(result.token_ids, result.finish_reason) for result in results]


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 1}, {"max_num_seqs": 3, "swap_space": 0.01}])
def test_answers_are_those_without_a_head(target: Path, head: Path, settings: dict[str, int]) -> None:
    with load(target) as llm:
        expected = answers(llm)
    with load(target, **{"speculation": "eagle3", "draft_model": str(head), **settings}) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_draft_tokens > 0


def test_a_head_of_another_model_is_refused(target: Path, head: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_model is .*: LlamaForCausalLM is no EAGLE-3 head"):
        load(target, speculation="eagle3", draft_model=str(target))
    with pytest.raises(ConfigError, match="draft_model"):
        load(target, speculation="eagle3", draft_model=str(head / "nowhere"))
