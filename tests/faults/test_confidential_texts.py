"""No prompt and no answer is written anywhere: all that a run leaves is searched, and planted leaks are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from tokenizers import Tokenizer

import support.durable.needed  # noqa: F401
from support.faults import defects
from support.faults.nothing_lost import run_dir, shm_prefix
from support.faults.service import SETTINGS, make_repository
from support.faults.text_traces import SHARED_MEMORY, SecretText, dumpable, holders
from support.triton.burst import bursting
from support.triton.serving import (
    WEIGHTS,
    Server,
    grpc_inputs,
    grpc_stream,
    sse_events,
    start_server,
    stop_server,
    wait_for,
    wait_ready,
)

pytestmark = pytest.mark.e2e

PROMPT, ANSWER = "zebraquagga7261", "okapigiraffe9415"
CHOICE = {"guided_choice": [ANSWER], "max_tokens": 64}


class Run:
    """A server that writes all that it can write, below one folder."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self.prefix = shm_prefix(server)

    def pages(self) -> dict[str, bytes]:
        urls = [f"http://127.0.0.1:{self.server.metrics_port}/metrics", f"{self.server.openai}/metrics"]
        urls += [f"http://127.0.0.1:{self.server.health_port}/{path}" for path in ("metrics", "ready")]
        urls += [f"{self.server.http}/v2/{path}" for path in ("models/demo", "models/demo/config", "models/stats")]
        return {url: requests.get(url, timeout=60).content for url in urls}

    def holders(self, *secrets: SecretText, **pages: bytes) -> list[str]:
        """Return what holds one of the texts, but the folder of the queue and Triton's regions of shared memory."""
        shown = {**self.pages(), **pages} if self.server.process.poll() is None else pages
        own = (str(self.folder / "queue"), str(SHARED_MEMORY / self.prefix))
        return holders(secrets, [self.folder, SHARED_MEMORY], shown, own)


@contextmanager
def running(folder: Path, variables: dict[str, str]) -> Iterator[Run]:
    settings = {**SETTINGS, "record": str(folder / "recording"), "request_log": str(folder / "requests.jsonl")}
    own = {"TMPDIR": "tmp", "TIDEWHEEL_RUN_DIR": "tmp/run", "XDG_CACHE_HOME": "cache"}
    for name in own.values():
        (folder / name).mkdir(mode=0o700, parents=True)
    (folder / "recording").mkdir()
    server = start_server(
        *("--model-repository", str(make_repository(folder, settings)), "--log-file", str(folder / "triton.log")),
        *("--verbose", "--allow-faults"),
        log=folder / "serve.log",
        variables={**{name: str(folder / value) for name, value in own.items()}, **variables},
        with_gateway=True,
    )
    try:
        yield Run(folder, wait_ready(server))
    finally:
        if server.process.poll() is None:
            stop_server(server)


def secret(text: str) -> SecretText:
    ids = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json")).encode(f" {text}", add_special_tokens=False).ids
    return SecretText(text, ids[1:-1])  # whatever is beside it


def ask_all_ways(server: Server) -> None:
    """Send the secrets where a text, a name of a choice or a mistake may stand."""
    assert ANSWER in server.generate(f"The {PROMPT} is", sampling_parameters=json.dumps(CHOICE))["text_output"]
    streamed = {"text_input": f"The {PROMPT} is", "stream": True, "sampling_parameters": json.dumps(CHOICE)}
    assert ANSWER in "".join(one["text_output"] for one in sse_events(server.post("demo/generate_stream", streamed)))
    inputs = grpc_inputs(f"The {PROMPT} is", stream=True, sampling_parameters=json.dumps(CHOICE))
    grpc_stream(server, inputs)
    messages = [{"role": "user", "content": f"What is {PROMPT}?"}]
    for path, body in {
        "chat/completions": {"messages": messages, "max_tokens": 4},
        "completions": {"prompt": f"The {PROMPT} is", **CHOICE, "logprobs": 2, "echo": True},
        "embeddings": {"input": f"The {PROMPT}"},
    }.items():
        answer = requests.post(f"{server.openai}/v1/{path}", json={"model": "demo", **body}, timeout=60)
        assert answer.status_code in (200, 400), answer.text
    assert requests.post(f"{server.openai}/tokenize", json={"model": "demo", "prompt": PROMPT}, timeout=60).ok


MISTAKES: tuple[dict[str, Any], ...] = (
    {"temperature": PROMPT},
    {PROMPT: 1},
    {"stop": [PROMPT] * 100},
    {"sampling_parameters": f'{{"{PROMPT}'},
    {"sampling_parameters": json.dumps({"guided_regex": f"({PROMPT}"})},
    {"sampling_parameters": json.dumps({"guided_grammar": f"root ::= {PROMPT}"})},
    {"text_input": PROMPT * 20_000},
    {"messages": f'[{{"role": "{PROMPT}", "content": 1}}]'},
)


def make_mistakes(server: Server) -> None:
    for mistake in MISTAKES:
        assert server.post("demo/generate", {"text_input": "a", **mistake}).status_code >= 400
        body = {"model": "demo", "prompt": "a", **mistake}
        assert requests.post(f"{server.openai}/v1/completions", json=body, timeout=60).status_code >= 400
    for data in (f'{{"text_input": "{PROMPT}'.encode(), PROMPT.encode() + b"\xff"):
        assert server.post("demo/generate", data).status_code >= 400
        headers = {"Content-Type": "application/json"}
        answer = requests.post(f"{server.openai}/v1/completions", data=data, headers=headers, timeout=60)
        assert answer.status_code >= 400


def break_off(server: Server) -> None:
    """Cancel streams, and kill engine and front end while others run."""
    for process in (None, server.engine_process(), server.stubs("demo")[0]):
        with bursting(server, num_clients=1) as burst:
            for number in range(4):
                burst.send(f"The {PROMPT} is {number}", 400)
            burst.receive_until_all_run()
            if process is not None:
                process.send_signal(6)  # a fault handler writes stacks
                process.wait(60)
        wait_for(lambda: server.is_ready() and server.readiness()[0] == 200, 120, "a server that serves again")


def work_off_a_queue(run: Run) -> bytes:
    """Return what the worker says."""
    command = [sys.executable, "-m", "tidewheel.cli.main"]
    where = ["--dir", str(run.folder / "queue")]
    (run.folder / "jobs").write_text(json.dumps({"id": "a", "prompt": f"The {PROMPT} is", "params": CHOICE}))
    (run.folder / "jobs").chmod(0o600)
    environment = {**os.environ, "TMPDIR": str(run.folder / "tmp")}
    subprocess.run([*command, "enqueue", "--file", str(run.folder / "jobs"), *where], check=True, env=environment)
    (run.folder / "jobs").unlink()
    worker = [*command, "worker", "--url", run.server.grpc, "--model", "demo", "--until-empty", *where]
    said = subprocess.run(worker, check=True, env=environment, capture_output=True, timeout=120)
    results = subprocess.run([*command, "results", *where], check=True, env=environment, capture_output=True)
    assert ANSWER.encode() in results.stdout
    return said.stdout + said.stderr


def test_no_text_is_written_anywhere(short_path: Path) -> None:
    secrets = [secret(PROMPT), secret(ANSWER)]
    with running(short_path, {}) as run:
        server, queue = run.server, run.folder / "queue"
        ask_all_ways(server)
        make_mistakes(server)
        said = work_off_a_queue(run)
        break_off(server)
        ask_all_ways(server)
        processes = [server.process.pid, *(process.pid for process in server.descendants())]
        assert {pid: found for pid in processes if (found := dumpable(pid))} == {}
        assert run.holders(*secrets, worker=said) == []
        assert queue.stat().st_mode & 0o077 == 0, "it holds the jobs"
        assert run_dir(server).parent.stat().st_mode & 0o077 == 0
        regions = list(SHARED_MEMORY.glob(f"{run.prefix}*"))
        assert len(regions) >= 2
        assert {path.stat().st_mode & 0o077 for path in regions} == {0}
        assert stop_server(server) == 0
        assert run.holders(*secrets) == []
    assert list(SHARED_MEMORY.glob(f"{run.prefix}*")) == []
    assert any((run.folder / "recording").iterdir())
    assert (run.folder / "requests.jsonl").stat().st_size > 1000


@pytest.mark.slow
def test_planted_leaks_are_found(short_path: Path) -> None:
    switch = short_path / "switch"
    switch.write_text("")
    (short_path / "run").mkdir()
    with running(short_path / "run", defects.variables(switch)) as run:
        for number, name in enumerate(["", *defects.LEAKS]):
            switch.write_text(name)
            prompt, answer = f"zebra{number}quagga7261", f"okapi{number}giraffe9415"
            run.server.generate(f"The {prompt} is", sampling_parameters=json.dumps({"guided_choice": [answer]}))
            secrets = [secret(prompt), secret(answer)]
            if name:
                wait_for(lambda secrets=secrets: run.holders(*secrets), 30, f"a trace of {name}")  # type: ignore[misc]
            else:
                assert run.holders(*secrets) == []
    Path(defects.LAST_ANSWER).unlink()
