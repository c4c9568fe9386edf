"""Greedy streams of a server that is killed go on at another one, with the text of an undisturbed answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from support.triton.serving import REPOSITORY, Server, free_ports, start_server, stop_server, wait_for, wait_ready

pytestmark = pytest.mark.e2e
MODEL: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 800, "stream": True}
EXTRA: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}


@dataclass
class Reading:
    """One stream, as its client sees it."""

    text: str = ""
    reason: str | None = None
    tokens: tuple[int, int] = (0, 0)  # of the prompt, and of the answer

    def of_chat(self, client: openai.OpenAI, content: str) -> Reading:
        messages: Any = [{"role": "user", "content": content}]
        for part in client.chat.completions.create(messages=messages, **MODEL, **EXTRA):
            self.take(part, [(one.delta.content or "", one.finish_reason) for one in part.choices])
        return self

    def of_text(self, client: openai.OpenAI, prompt: str) -> Reading:
        for part in client.completions.create(prompt=prompt, **MODEL, **EXTRA):
            self.take(part, [(one.text, one.finish_reason) for one in part.choices])
        return self

    def take(self, part: Any, choices: list[tuple[str, str | None]]) -> None:
        for text, reason in choices:
            self.text, self.reason = self.text + text, reason or self.reason
        if part.usage is not None:
            self.tokens = (part.usage.prompt_tokens, part.usage.completion_tokens)


@contextmanager
def gateway_process(*servers: Server) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", "--port", str(port), "--continue-greedy"]
    urls = [argument for one in servers for argument in ("--url", one.grpc)]
    process = subprocess.Popen([*command, *urls], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: num_ready(url) == len(servers), 60, "gateway")
        yield url
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def metric(url: str, name: str) -> list[float]:
    try:
        lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    except requests.ConnectionError:
        return []
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tidewheel_gateway_{name}")]


def num_ready(url: str) -> int:
    return int(sum(metric(url, "upstream_ready")))


def test_streams_of_a_killed_server_go_on(server: Server, tmp_path: Path) -> None:
    arguments = ("--model-repository", str(REPOSITORY), "--models", "demo")
    other = wait_ready(start_server(*arguments, log=tmp_path / "other.log"))
    ways = [(Reading.of_chat, "What is a tuple?"), (Reading.of_chat, "What is a list?")]
    ways += [(Reading.of_text, "A tuple is"), (Reading.of_text, "A list is")]
    try:
        with (
            gateway_process(server, other) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ThreadPoolExecutor(len(ways)) as pool,
        ):
            readings = [Reading() for _ in ways]
            pairs = zip(readings, ways, strict=True)
            futures = [pool.submit(read, reading, client, prompt) for reading, (read, prompt) in pairs]
            wait_for(lambda: all(one.text for one in readings), 60, "first words of all")
            other.triton_process().kill()
            for future in futures:
                future.result(120)
            (num_continued,) = metric(url, "continued_total")
            assert num_continued > 0
            expected = [read(Reading(), client, prompt) for read, prompt in ways]
            assert [one.reason for one in expected] == ["length"] * len(ways)
            assert readings == expected
    finally:
        stop_server(other)
