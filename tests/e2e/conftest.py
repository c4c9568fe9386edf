"""One real tritonserver with the demo model and its twin, and what transformers says of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.triton.serving import REPOSITORY, WEIGHTS, Server, start_server, stop_server, wait_ready


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "serve.log"
    running = wait_ready(start_server("--model-repository", str(REPOSITORY), "--models", "demo,demo_infer", log=log))
    yield running
    assert stop_server(running) == 0, log.read_text()


@pytest.fixture(scope="session")
def reference() -> Callable[[str, int], tuple[list[int], list[int], str]]:
    """Prompt and length → (prompt ids, greedy ids, text) by `transformers.generate` in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()

    def generate(prompt: str, count: int) -> tuple[list[int], list[int], str]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens = output[0, ids.shape[1] :].tolist()
        return ids[0].tolist(), tokens, tokenizer.decode(tokens, skip_special_tokens=True)

    return generate
