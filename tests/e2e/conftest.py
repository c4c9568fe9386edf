"""One real tritonserver with the demo model and its twin, and the tokens of transformers for the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.faults.slowed import pace_of, slowed_by
from support.triton.serving import REPOSITORY, WEIGHTS, Server, start_server, stop_server, wait_for, wait_ready

CLEAR = 1e-3  # rounding in float32 moves a logit of the demo model by about 1e-5
IDLE_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def shared() -> list[Server]:
    """Return the server that all modules share, once it runs."""
    return []


@pytest.fixture(scope="module", autouse=True)
def _left_as_found(shared: list[Server]) -> Iterator[None]:
    yield
    for running in shared:
        wait_for(lambda running=running: _is_idle(running), IDLE_LIMIT_S, "no request and all blocks free")


def _is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(server.metric(name, model_name="demo") for name in names)


@pytest.fixture(scope="session")
def server(shared: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "serve.log"
    arguments = ("--model-repository", str(REPOSITORY), "--models", "demo,demo_infer")
    running = wait_ready(start_server(*arguments, log=log, with_gateway=True))
    shared.append(running)
    yield running
    assert stop_server(running) == 0, log.read_text()


@pytest.fixture(scope="session")
def _second_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("second") / "serve.log"
    arguments = ("--model-repository", str(REPOSITORY), "--models", "demo", "--allow-faults")
    running = start_server(*arguments, log=log, variables=slowed_by(0.0, pace_of(log)))
    yield running
    stop_server(running)


@pytest.fixture
def other(_second_server: Server) -> Server:
    """Return a second server of the demo model. A test may kill its processes, which come back, or slow it down."""
    return wait_ready(_second_server)


Reference = Callable[[str, int], tuple[list[int], list[int], str]]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return greedy_reference(WEIGHTS)


def greedy_reference(folder: Path) -> Reference:
    """Prompt and length → (prompt ids, greedy ids, text) by `transformers.generate` in float32.

    Fails where rounding might choose another token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompt: str, count: int) -> tuple[list[int], list[int], str]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            answer = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(answer.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > CLEAR, f"rounding may decide after {prompt!r}: choose another"
        tokens = answer.sequences[0, ids.shape[1] :].tolist()
        return ids[0].tolist(), tokens, tokenizer.decode(tokens, skip_special_tokens=True)

    return functools.cache(generate)
