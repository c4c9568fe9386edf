"""An entry of Triton's vLLM backend with several adapters, served as it is: each request has its adapter's tokens."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import requests
import torch
import tritonclient.grpc as grpcclient

from e2e.conftest import Reference, greedy_reference
from support.entries.foreign_entries import SAMPLE, SAMPLE_LORA_JSON
from support.models.peft_folders import WEIGHTS_NAME, read_peft, write_folder, write_merged, write_peft
from support.triton.serving import (
    WEIGHTS,
    Server,
    StreamError,
    grpc_inputs,
    grpc_stream,
    sse_events,
    start_server,
    stop_server,
    texts,
    token_ids,
    wait_for,
    wait_ready,
)
from tidewheel.cli.main import main

pytestmark = pytest.mark.e2e

MODEL = "vllm_model"
PROMPTS = ("The Python interpreter is", "A function returns", "What is a class?")
COUNT = 16
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
LIMIT_S = 120.0
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "alpaca": {"seed": 1, "rank": 8},
    "bactrian": {"seed": 2, "rank": 16, "use_rslora": True, "targets": ("q_proj", "v_proj", "down_proj")},
    "later": {"seed": 3, "rank": 4},
}
NAMED = ("", "alpaca", "bactrian")  # by multi_lora.json; empty: the model alone


class Repository(NamedTuple):
    folder: Path
    tokens: Callable[[str, str], list[int]]  # by adapter and prompt
    text: Callable[[str, str], str]

    @property
    def loras(self) -> Path:
        """Folder below which clients may load adapters."""
        return self.folder / MODEL / "1" / "loras"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Write the files of docs/llama_multi_lora_tutorial.md of the vLLM backend, and migrate them."""
    folder = tmp_path_factory.mktemp("loras")
    for name, values in ADAPTERS.items():
        write_peft(folder / "weights" / "loras" / name, WEIGHTS, **values)
    entry = folder / "model_repository" / MODEL
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(SAMPLE.replace('"sample"', f'"{MODEL}"'))
    settings = {**SAMPLE_LORA_JSON, "model": str(WEIGHTS), "kv_cache_memory_mb": 64, "dtype": "float32"}
    (entry / "1" / "model.json").write_text(json.dumps(settings))
    paths = {name: f"{folder}/weights/loras/{name}" for name in NAMED if name}
    (entry / "1" / "multi_lora.json").write_text(json.dumps(paths))
    assert main(["migrate", str(folder / "model_repository"), "--out", str(folder / "models")]) == 0
    references: dict[str, Reference] = {"": greedy_reference(WEIGHTS)}
    for name in ADAPTERS:
        merged = write_merged(folder / "merged" / name, WEIGHTS, folder / "weights" / "loras" / name)
        references[name] = greedy_reference(merged)
    written = Repository(
        folder / "models",
        lambda name, prompt: references[name](prompt, COUNT)[1],
        lambda name, prompt: references[name](prompt, COUNT)[2],
    )
    shutil.copytree(folder / "weights" / "loras" / "later", written.loras / "later")
    return written


@pytest.fixture(scope="module")
def server(repository: Repository) -> Iterator[Server]:
    log = repository.folder / "serve.log"
    arguments = ("--model-repository", str(repository.folder), "--model-control", "explicit")
    running = wait_ready(start_server(*arguments, log=log, with_gateway=True))
    yield running
    assert stop_server(running) == 0, log.read_text()


def grpc_tokens(server: Server, prompt: str, **parameters: Any) -> list[int]:
    inputs = grpc_inputs(prompt, sampling_parameters=json.dumps({**GREEDY, **parameters}), return_token_ids=True)
    return token_ids(grpc_stream(server, inputs, model=MODEL))


def named(name: str) -> dict[str, str]:
    return {"lora_name": name} if name else {}


def check_all(server: Server, repository: Repository, names: tuple[str, ...] = NAMED) -> None:
    """Ask for all adapters and prompts at once, so that steps mix them."""
    cases = list(itertools.product(names, PROMPTS))
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = pool.map(lambda case: grpc_tokens(server, case[1], **named(case[0])), cases)
        found = dict(zip(cases, answers, strict=True))
    assert found == {(name, prompt): repository.tokens(name, prompt) for name, prompt in cases}


def order(server: Server, **parameters: str) -> str:
    inputs = grpc_inputs("", sampling_parameters=json.dumps(parameters))
    return "".join(texts(grpc_stream(server, inputs, model=MODEL)))


def test_the_adapters_differ(repository: Repository) -> None:
    for prompt in PROMPTS:
        assert len({tuple(repository.tokens(name, prompt)) for name in ("", *ADAPTERS)}) == 1 + len(ADAPTERS)


def test_names_in_sampling_parameters(server: Server, repository: Repository) -> None:
    check_all(server, repository)
    check_all(server, repository)  # with cached prefixes


@pytest.mark.parametrize("name", NAMED)
def test_names_as_parameters_of_the_request(server: Server, repository: Repository, name: str) -> None:
    prompt = PROMPTS[0]
    inputs = grpc_inputs(prompt, return_token_ids=True)
    results = grpc_stream(server, inputs, model=MODEL, parameters={**GREEDY, **named(name)})
    assert token_ids(results) == repository.tokens(name, prompt)
    answer = server.post(f"{MODEL}/generate", {"text_input": prompt, **GREEDY, **named(name)})
    assert answer.json()["text_output"] == prompt + repository.text(name, prompt)
    body = {"text_input": prompt, "stream": True, **GREEDY, **named(name)}
    events = sse_events(server.post(f"{MODEL}/generate_stream", body, stream=True))
    assert "".join(event["text_output"] for event in events) == repository.text(name, prompt)


def test_the_sample_client_of_the_vllm_backend(server: Server, repository: Repository) -> None:
    """A request as samples/client_lora.py makes it: texts for numbers, and parameters twice."""
    sampling = {"temperature": "0", "top_p": "0.95", "max_tokens": str(COUNT), "lora_name": "alpaca"}
    inputs = grpc_inputs(
        PROMPTS[0], stream=False, sampling_parameters=json.dumps(sampling), exclude_input_in_output=True
    )
    outputs = [grpcclient.InferRequestedOutput("text_output")]
    results = grpc_stream(server, inputs, model=MODEL, outputs=outputs, request_id="0", parameters=sampling)
    assert texts(results) == [repository.text("alpaca", PROMPTS[0])]
    with pytest.raises(StreamError) as error:
        grpc_tokens(server, PROMPTS[0], lora_name="doll")
    words = "LoRA doll is not supported, we currently support ['alpaca', 'bactrian']"
    assert str(error.value).endswith(words)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as one:
        yield one


def completion(client: openai.OpenAI, name: str, prompt: str = PROMPTS[0]) -> tuple[str, str]:
    """Return the text of an adapter, and the model that the answer names."""
    answer = client.completions.create(
        model=name or MODEL, prompt=prompt, max_tokens=COUNT, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text, answer.model


def test_models_of_the_gateway(server: Server, repository: Repository, client: openai.OpenAI) -> None:
    for name in NAMED:
        assert completion(client, name) == (repository.text(name, PROMPTS[0]), name or MODEL)
    stream = client.chat.completions.create(
        model="alpaca", messages=[{"role": "user", "content": "Hello"}], max_tokens=COUNT, stream=True
    )
    assert {part.model for part in stream} == {"alpaca"}
    cards = requests.get(f"{server.openai}/v1/models", timeout=60).json()["data"]
    adapters = {card["id"]: (card["parent"], card["root"]) for card in cards if card.get("parent")}
    folder = repository.folder.parent / "weights" / "loras"
    assert adapters == {name: (MODEL, str(folder / name)) for name in NAMED if name}
    with pytest.raises(openai.NotFoundError, match="doll"):
        completion(client, "doll")


def gateway_order(server: Server, action: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.openai}/v1/{action}_lora_adapter", json=body, timeout=60)


def test_load_and_unload_by_the_gateway(server: Server, repository: Repository, client: openai.OpenAI) -> None:
    path = str(repository.loras / "later")
    answer = gateway_order(server, "load", lora_name="later", lora_path=path)
    assert answer.status_code == 200, answer.text
    assert completion(client, "later") == (repository.text("later", PROMPTS[0]), "later")
    assert gateway_order(server, "load", lora_name="later", lora_path=path).status_code == 400
    answer = gateway_order(server, "load", lora_name="later", lora_path=path, load_inplace=True)
    assert answer.status_code == 200, answer.text
    check_all(server, repository, ("", *ADAPTERS))
    assert gateway_order(server, "unload", lora_name="later").status_code == 200
    with pytest.raises(openai.NotFoundError):
        completion(client, "later")
    assert gateway_order(server, "unload", lora_name="later").status_code == 404


def test_load_and_unload_by_a_command(
    server: Server, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ("--server", str(server.http_port))
    assert main(["load", MODEL, "--lora", f"later={repository.loras / 'later'}", *port]) == 0
    check_all(server, repository, ("", "later"))
    assert main(["unload", MODEL, "--lora", "later", *port]) == 0
    assert main(["load", MODEL, "--lora", f"later={repository.loras / 'absent'}", *port]) == 2
    assert str(repository.loras / "absent") in capsys.readouterr().err


def test_a_new_version_under_a_name(server: Server, repository: Repository) -> None:
    """Cached blocks of the old version are not found by the new one."""
    changing = repository.loras / "changing"
    for name in ("alpaca", "later", "alpaca"):
        shutil.rmtree(changing, ignore_errors=True)
        shutil.copytree(repository.folder.parent / "weights" / "loras" / name, changing)
        order(server, lora_order="load", lora_name="changing", lora_path=str(changing))
        for prompt in PROMPTS:
            assert grpc_tokens(server, prompt, lora_name="changing") == repository.tokens(name, prompt)
    rows = {row["name"]: row for row in json.loads(order(server, lora_order="list"))}
    assert rows["changing"]["path"] == str(changing) and rows["changing"]["rank"] == 8
    order(server, lora_order="unload", lora_name="changing")
    assert list(rows) == ["alpaca", "bactrian", "changing"]


Damage = Callable[[Path], object]


def with_fields(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        fields, tensors = read_peft(folder)
        write_folder(folder, {**fields, **changes}, tensors)

    return damage


def with_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(folder: Path) -> None:
        fields, tensors = read_peft(folder)
        first = next(iter(tensors))
        write_folder(folder, fields, {**tensors, first: change(tensors[first])})

    return damage


BAD: Mapping[str, tuple[Damage, str]] = {
    "absent": (shutil.rmtree, "there is no folder"),
    "not a number": (with_first(lambda tensor: tensor.index_fill(1, torch.tensor([0]), np.nan)), "finite"),
    "of another base": (with_first(lambda tensor: tensor[:, :-8].contiguous()), "this base asks for"),
    "too high a rank": (lambda folder: write_peft(folder, WEIGHTS, rank=32), "max_lora_rank, which is 16"),
    "DoRA": (with_fields(use_dora=True), "use_dora"),
    "pickled": (lambda folder: (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin"), "never loaded"),
    "cut": (lambda folder: (folder / WEIGHTS_NAME).write_bytes(b"\x10" * 64), WEIGHTS_NAME),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_adapters_are_refused_in_one_line(server: Server, repository: Repository, bad: str) -> None:
    folder = write_peft(repository.loras / "bad", WEIGHTS, seed=9)
    damage, words = BAD[bad]
    damage(folder)
    with ThreadPoolExecutor(1) as pool:
        neighbours = pool.submit(check_all, server, repository)
        with pytest.raises(StreamError) as error:
            order(server, lora_order="load", lora_name="bad", lora_path=str(folder))
        assert words in str(error.value) and "\n" not in str(error.value)
        assert str(folder) in str(error.value)
        with pytest.raises(StreamError, match="LoRA bad is not supported"):
            grpc_tokens(server, PROMPTS[0], lora_name="bad")
        neighbours.result()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("way", ["absolute", "..", "a link"])
def test_a_path_outside_of_the_folder(server: Server, repository: Repository, way: str) -> None:
    outside = repository.folder.parent / "weights" / "loras" / "alpaca"
    link = repository.loras / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    path = {"absolute": outside, "..": repository.loras / ".." / ".." / ".." / ".." / "weights", "a link": link}[way]
    with pytest.raises(StreamError) as error:
        order(server, lora_order="load", lora_name="outside", lora_path=str(path))
    assert "lora_dir" in str(error.value) and "\n" not in str(error.value)
    answer = gateway_order(server, "load", lora_name="outside", lora_path=str(path))
    assert answer.status_code == 400 and "lora_dir" in answer.json()["error"]["message"]


def test_an_engine_that_is_started_again_knows_its_adapters(server: Server, repository: Repository) -> None:
    order(server, lora_order="load", lora_name="later", lora_path=str(repository.loras / "later"))
    engine = server.engine_process()
    assert engine is not None
    engine.kill()
    wait_for(lambda: server.readiness()[1] != "ready", LIMIT_S, "the death")
    wait_for(lambda: server.readiness() == (200, "ready"), LIMIT_S, "another engine")
    check_all(server, repository, ("", *ADAPTERS))
    order(server, lora_order="unload", lora_name="later")


def test_a_changed_file_counts_after_a_reload(server: Server, repository: Repository) -> None:
    """Last: the file names another adapter."""
    path = repository.folder / MODEL / "1" / "multi_lora.json"
    before, engine = path.read_text(), server.engine_process()
    path.write_text(json.dumps({**json.loads(before), "later": "loras/later", "broken": "loras/broken"}))
    server.control("reload", MODEL)
    check_all(server, repository, ("", *ADAPTERS))
    with pytest.raises(StreamError) as error:
        grpc_tokens(server, PROMPTS[0], lora_name="broken")
    assert "loras/broken" in str(error.value) and "\n" not in str(error.value)
    assert engine is not None and server.engine_process() == engine
