"""Load, unload and reload, by command and by polling, while 50 streams run on another model."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import tritonclient.grpc as grpcclient

from support.faults.nothing_lost import run_dir
from support.faults.slowed import slowed_by
from support.triton.burst import PROMPTS, Burst, steady_streams
from support.triton.serving import REPOSITORY, Server, start_server, stop_server, wait_for, wait_ready
from tidewheel.adapter.stub_process import read_mark
from tidewheel.private_dir import RUN_DIR
from tidewheel.server import ServeError
from tidewheel.server.workdir import control_of
from tidewheel_process.child import start_ticks

pytestmark = pytest.mark.e2e

Reference = Callable[[str, int], tuple[list[int], list[int], str]]

NUM_STREAMS = 50
LIMIT_S = 120.0
STEP_S = 0.1  # streams that run as fast as they can take the processors of the loads that they are to outlast
CONFIG = """
backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "kv_cache_memory_mb" value { string_value: "64" } }
parameters { key: "dtype" value { string_value: "float32" } }
"""
TWIN = 'backend: "tidewheel"\nmodel_transaction_policy { decoupled: false }\n'
TWIN += 'parameters { key: "engine_of" value { string_value: "moving" } }\n'


def write_entry(folder: Path, config: str = CONFIG) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if config == CONFIG:
        shutil.copytree(REPOSITORY / "demo" / "1" / "weights", folder / "1" / "weights")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_entry(folder / "demo")
    write_entry(folder / "moving")
    write_entry(folder / "moving_infer", TWIN)
    return folder


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, list[int]]:
    return {prompt: reference(prompt, 32)[1] for prompt in PROMPTS}


@contextlib.contextmanager
def serve(repository: Path, *arguments: str) -> Iterator[Server]:
    log = repository.parent / f"{repository.name}.log"
    command = ("--model-repository", str(repository), "--allow-faults", *arguments)
    running = wait_ready(start_server(*command, log=log, variables=slowed_by(STEP_S, log.with_suffix(".pace"))))
    yield running
    running.session.close()  # Triton would wait for it
    assert stop_server(running) == 0, log.read_text()


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serve(repository, "--model-control", "explicit", "--models", "demo,moving,moving_infer") as running:
        yield running


def engines(server: Server, name: str = "moving") -> set[int]:
    """Return the process ids of a model's engines."""
    found = set()
    for process in server.descendants():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "--engine-dir" in line and f"/{name}-" in line[line.index("--engine-dir") + 1]:
            found.add(process.pid)
    return found


def front_end(server: Server, name: str) -> psutil.Process:
    """Return a front end that counts no request as open: the server would start again instead of its model."""
    found = server.stubs(name)[0]

    def is_idle() -> bool:
        mark = read_mark(found.pid, start_ticks(found.pid) or 0)
        return mark is not None and mark.num_open == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIR, str(run_dir(server)))
        wait_for(is_idle, LIMIT_S, "last responses")
    return found


def state_of(server: Server, name: str) -> str | None:
    index = requests.post(f"{server.http}/v2/repository/index", timeout=60).json()
    return next((entry.get("state") for entry in index if entry["name"] == name), None)


def ask(server: Server, name: str = "moving", **parameters: Any) -> str:
    """Return the text, or the error."""
    body = {"text_input": PROMPTS[0], "max_tokens": 4, "temperature": 0, **parameters}
    answer = server.post(f"{name}/generate", body).json()
    return str(answer.get("text_output") or answer["error"])


def edit(repository: Path, **settings: object) -> None:
    (repository / "moving" / "1" / "model.json").write_text(json.dumps(settings))


def test_every_order_of_loads_disturbs_no_other_model(server: Server, expected: dict[str, list[int]]) -> None:
    with steady_streams(server, NUM_STREAMS, expected):
        text, (first,) = ask(server), engines(server)
        server.control("unload", "moving")
        assert ask(server, "moving_infer") == text  # the engine has another owner now
        server.control("load", "moving")
        server.control("unload", "moving_infer")
        server.control("load", "moving_infer")
        assert (ask(server), ask(server, "moving_infer")) == (text, text)
        assert engines(server) == {first}
        server.control("unload", "moving_infer")
        server.control("unload", "moving")
        wait_for(lambda: not engines(server), LIMIT_S, "end of the engine")
        server.control("load", "moving_infer")
        server.control("load", "moving")
        assert (ask(server), ask(server, "moving_infer")) == (text, text)
        assert len(engines(server)) == 1


def test_a_reload_keeps_the_engine_or_replaces_it(
    server: Server, repository: Path, expected: dict[str, list[int]]
) -> None:
    with steady_streams(server, NUM_STREAMS, expected):
        (first,) = engines(server)
        edit(repository, max_num_seqs=3, tenants={"poor": {"requests_per_s": 0.001}})
        server.control("reload", "moving")
        assert "TW-BUSY" not in ask(server, tenant="poor")
        assert "[TW-BUSY" in ask(server, "moving_infer", tenant="poor")
        edit(repository, session_max_blocks=1 << 30)
        with pytest.raises(ServeError, match="session_max_blocks is 1073741824: the KV cache has"):
            server.control("reload", "moving")
        assert engines(server) == {first}
        edit(repository, max_model_len=64)
        server.control("reload", "moving")
        assert "context of 64" in ask(server, text_input="a " * 100)
        wait_for(lambda: "context of 64" in ask(server, "moving_infer", text_input="a " * 100), LIMIT_S, "the twin")
        wait_for(lambda: len(engines(server)) == 1, LIMIT_S, "end of the old engine")
        assert engines(server) != {first}


def test_requests_of_the_reloaded_model_end_where_they_began(
    server: Server, repository: Path, expected: dict[str, list[int]]
) -> None:
    edit(repository)
    server.control("reload", "moving")
    wait_for(lambda: len(engines(server)) == 1, LIMIT_S, "end of the old engine")
    burst = Burst(server, model="moving")
    for prompt in PROMPTS:
        burst.send(prompt, 200)
    edit(repository, ageing_s=3)
    server.control("reload", "moving")
    (first,) = engines(server)
    edit(repository, max_model_len=512)
    server.control("reload", "moving")
    burst.finish()
    burst.close()
    assert burst.errors == []
    assert burst.finals == {str(index): 1 for index in range(len(PROMPTS))}
    assert [tokens[:32] for tokens in burst.tokens.values()] == list(expected.values())
    assert {len(tokens) for tokens in burst.tokens.values()} == {200}
    wait_for(lambda: first not in engines(server), LIMIT_S, "end of the old engine")


def test_a_dead_front_end_is_replaced_and_no_other_model_notices(
    server: Server, expected: dict[str, list[int]]
) -> None:
    text = ask(server, "moving_infer")
    with steady_streams(server, NUM_STREAMS, expected):
        for name in ("moving_infer", "moving"):
            front_end(server, name).kill()
            said = f"model '{name}' is loaded again"
            wait_for(lambda said=said: said in server.log.read_text(), LIMIT_S, said)
            assert (ask(server), ask(server, "moving_infer")) == (text, text)
    assert "starting the server again" not in server.log.read_text()


def test_polling_follows_the_repository(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    write_entry(tmp_path / "demo")
    with serve(tmp_path, "--repository-poll-s", "1") as server, steady_streams(server, NUM_STREAMS, expected):
        write_entry(tmp_path / "moving.new")
        (tmp_path / "moving.new").rename(tmp_path / "moving")
        wait_for(lambda: state_of(server, "moving") == "READY", LIMIT_S, "the new entry")
        (first,) = engines(server)
        edit(tmp_path, tenants={"poor": {"requests_per_s": 0.001}})
        wait_for(lambda: "[TW-BUSY" in ask(server, tenant="poor"), LIMIT_S, "the new settings")
        assert engines(server) == {first}
        shutil.rmtree(tmp_path / "moving")
        wait_for(lambda: not engines(server), LIMIT_S, "end of the engine")


def test_clients_load_models_where_that_is_open(tmp_path: Path) -> None:
    write_entry(tmp_path / "demo")
    write_entry(tmp_path / "moving")
    opened = ("--model-control", "explicit", "--open-api", "model-repository", "--models", "demo")
    with serve(tmp_path, *opened) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        assert "warning: --open-api model-repository lets all that reach 127.0.0.1 run code" in server.log.read_text()
        client.load_model("moving")
        text = ask(server)
        front_end(server, "moving").kill()
        wait_for(lambda: "model 'moving' is loaded again" in server.log.read_text(), LIMIT_S, "the model again")
        assert ask(server) == text
        client.unload_model("moving")
        wait_for(lambda: state_of(server, "moving") == "UNAVAILABLE", LIMIT_S, "the end of moving")
        ran = tmp_path / "ran"  # what the warning says, and what `faults/test_strangers.py` shows to be closed else
        code = f"import pathlib; pathlib.Path({str(ran)!r}).touch()\nclass TritonPythonModel:\n    pass\n"
        client.load_model("stolen", config='{"backend": "python"}', files={"file:1/model.py": code.encode()})
        assert ran.exists()
        with pytest.raises(ServeError, match="without --open-api model-repository"):
            control_of(server.http_port)
