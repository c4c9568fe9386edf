"""Entries with vLLM's engine arguments on a real server, and the API of its Python backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.triton.serving import ROOT, WEIGHTS, Server, start_server, stop_server, wait_for, wait_ready
from tidewheel import LLM, SamplingParams

pytestmark = pytest.mark.e2e

CONFIG = 'backend: "tidewheel"\nmodel_transaction_policy { decoupled: true }\n'
HARMLESS = {
    "disable_log_requests": False, "enable_lora": False, "lora_dtype": "auto", "quantization": None, "dtype": "float",
    "scheduling_policy": "fcfs", "enable_chunked_prefill": True, "tensor_parallel_size": 1, "data_parallel_size": 1,
    "distributed_executor_backend": "mp", "revision": "main", "download_dir": None, "tokenizer_mode": "auto",
    "cpu_offload_gb": 0, "compilation_config": {"level": 3}, "max_seq_len_to_capture": 8192, "task": "generate",
    "hf_overrides": {}, "limit_mm_per_prompt": {"image": 2}, "speculative_config": None, "max_logprobs": 30,
    "kv_cache_memory_bytes": 64 << 20, "trust_remote_code": False, "disable_custom_all_reduce": True,
}  # fmt: skip

NARROW = {"kv_cache_dtype": "fp8", "dtype": "float32", "kv_cache_memory_mb": 8, "swap_space": 0.01}


def write_entry(repository: Path, name: str, arguments: dict[str, Any], **parameters: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()]
    (repository / name / "config.pbtxt").write_text(CONFIG + "\n".join(lines) + "\n")
    (repository / name / "1" / "model.json").write_text(json.dumps({"model": str(WEIGHTS), **arguments}))


def write_api_dump(entry: Path) -> None:
    (entry / "1").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "support" / "triton" / "api_dump.py", entry / "1" / "model.py")
    tensor = '{ name: "A" data_type: TYPE_BOOL dims: [ 1 ] }'
    (entry / "config.pbtxt").write_text(f'backend: "python"\ninput [ {tensor} ]\noutput [ {tensor} ]\n')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("arguments")
    write_entry(
        folder / "models",
        "named",
        {**HARMLESS, "served_model_name": ["llama", "other"], "override_generation_config": {"temperature": 0}},
        REPORT_CUSTOM_METRICS="True",
        ENABLE_VLLM_HEALTH_CHECK="true",
    )
    write_entry(folder / "models", "quiet", {"disable_log_stats": True}, kv_cache_memory_bytes="67108864")
    write_entry(folder / "models", "narrow", NARROW)
    write_api_dump(folder / "models" / "api")
    running = wait_ready(start_server("--model-repository", str(folder / "models"), "-v", log=folder / "serve.log"))
    yield running
    assert stop_server(running) == 0, running.log.read_text()


def ask(server: Server, model: str, **parameters: Any) -> dict[str, Any]:
    response = server.post(f"{model}/generate", {"text_input": "A tuple is", "max_tokens": 12, **parameters})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_one_line_names_what_has_no_effect(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "no effect here: " in line]
    assert len(lines) == 1
    names = lines[0].partition("no effect here: ")[2].split(", ")
    assert {"lora_dtype", "data_parallel_size", "ENABLE_VLLM_HEALTH_CHECK"} <= set(names)
    assert not {"quantization", "dtype", "max_logprobs"} & set(names)


def test_default_sampling_is_that_of_the_setting(server: Server) -> None:
    """The model's folder says temperature 0.7 and top_k 50, which an entry reads only if asked."""
    greedy = ask(server, "named")["text_output"]
    assert (
        greedy
        == ask(server, "named", temperature=0)["text_output"]
        == ask(server, "quiet", temperature=0)["text_output"]
    )
    plain = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    assert ask(server, "quiet", seed=5) == {**ask(server, "quiet", seed=5, **plain), "model_name": "quiet"}


def test_the_limit_of_logprobs(server: Server) -> None:
    wanted = {"max_tokens": 1, "logprobs": 25, "return_logprobs": True}
    entries = json.loads(ask(server, "named", **wanted)["logprobs"])
    assert len(entries[0]) in (25, 26)
    refused = server.post("quiet/generate", {"text_input": "A", **wanted})
    assert "logprobs is 25: it must be 0 to 20 (max_logprobs)" in refused.text


def test_a_cache_of_8_bits(server: Server) -> None:
    """The tokens are those of `LLM` with the same settings: computed, from the cache, and as turns of a session."""
    prompts = ["A tuple is", "The index of a table is a list of rows, and the rows of a table are"]
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(str(WEIGHTS), **NARROW) as llm:
        expected = [llm.generate([prompt], sampling, use_tqdm=False)[0].text for prompt in prompts]
    wanted = {"max_tokens": 24, "temperature": 0, "exclude_input_in_output": True}
    for _ in range(2):
        answers = [ask(server, "narrow", text_input=prompt, **wanted)["text_output"] for prompt in prompts]
        assert answers == expected
    session = {**wanted, "session_id": "s"}
    turns = [ask(server, "narrow", text_input=text, **session)["text_output"] for text in prompts[:1] * 2]
    assert turns == expected[:1] * 2
    body = {"text_input": "A tuple is", "task": "embed"}
    exact, narrow = (
        np.array(server.post(f"{name}/generate", body).json()["embedding"]) for name in ("named", "narrow")
    )
    likeness = float(exact @ narrow) / float(np.linalg.norm(exact) * np.linalg.norm(narrow))
    assert 0.99 < likeness < 1.0 and not np.array_equal(exact, narrow)
    assert "tokens, in float8_e4m3fn" in server.log.read_text()


def test_metrics_are_of_the_served_name_and_can_be_off(server: Server) -> None:
    ask(server, "named")
    ask(server, "quiet")
    prompts = "vllm:prompt_tokens_total"
    wait_for(lambda: server.metric(prompts, model_name="llama", model="named") > 0, 60, "figures of the entry")
    figures = server.metrics()
    names = [name for name in figures.names if name.startswith(("vllm:", "tidewheel"))]
    assert names and not [name for name in names if figures.samples(name, model="quiet")]


def test_the_python_backend_has_what_the_tests_of_the_adapter_assume(server: Server) -> None:
    facts = json.loads((ROOT / "tests" / "adapter" / "python_backend_api.json").read_text())
    api = json.loads((server.log.parent / "models" / "api" / "1" / "api.json").read_text())
    for name, parameters in facts["2.51.0"].items():
        assert name in api
        # A newer server may take more.
        assert parameters is None or api[name][: len(parameters)] == parameters, name
