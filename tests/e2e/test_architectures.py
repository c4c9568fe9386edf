"""Two native architectures, and two through transformers, behind one tritonserver: the tokens of transformers.

`tests/models/test_parity.py` has all of them in-process; in `make test-long`, so has this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from common.random_model import save_tokenizer
from support.long_runs import IS_LONG
from support.models import tiny_models
from support.triton.serving import Server, grpc_inputs, grpc_stream, start_server, stop_server, token_ids, wait_ready

pytestmark = pytest.mark.e2e

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(tiny_models.llama, rope_parameters=tiny_models.LLAMA3_ROPE),
    "qwen3": tiny_models.qwen3,
    "gemma2": tiny_models.gemma2,
    "gpt2": tiny_models.gpt2,
}
if IS_LONG:
    MAKERS |= {"mistral": tiny_models.mistral, "qwen2": tiny_models.qwen2, "gpt_neox": tiny_models.gpt_neox}
SETTINGS = {"model": "weights", "dtype": "float32", "num_blocks": "64", "max_num_batched_tokens": "48"}
NUM_TOKENS = 8


def write_entry(entry: Path, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    weights = entry / "1" / "weights"
    weights.mkdir(parents=True)
    model = tiny_models.save(make, weights)
    save_tokenizer(weights, tiny_models.VOCAB_SIZE)
    parameters = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in SETTINGS.items()
    )
    (entry / "config.pbtxt").write_text(f'backend: "tidewheel"\n{parameters}')
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, PreTrainedModel]]]:
    repository = tmp_path_factory.mktemp("architectures")
    made = {name: write_entry(repository / name, make) for name, make in MAKERS.items()}
    log = tmp_path_factory.mktemp("server") / "serve.log"
    server = wait_ready(start_server("--model-repository", str(repository), log=log))
    yield server, made
    assert stop_server(server) == 0, log.read_text()


@pytest.mark.parametrize("name", MAKERS)
def test_greedy_tokens(models: tuple[Server, dict[str, PreTrainedModel]], name: str) -> None:
    server, made = models
    prompts = tiny_models.prompts(4, 5, 90)
    expected = tiny_models.transformers_tokens(made[name], prompts, NUM_TOKENS)
    for prompt, tokens in zip(prompts, expected, strict=True):
        inputs = grpc_inputs(
            input_ids=prompt.tolist(),
            stream=True,
            return_token_ids=True,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
        )
        assert token_ids(grpc_stream(server, inputs, model=name)) == tokens
