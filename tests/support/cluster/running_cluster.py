"""A cluster that the command starts, in a folder of its own, and what is below it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from support.triton.serving import ROOT, wait_for
from tidewheel.metrics import UPSTREAM_READY
from tidewheel_client import Figures

LIMIT_S = 120.0


@dataclass
class RunningCluster:
    run_dir: Path
    port: int = 0
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(
        self, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tidewheel.cli.main", "cluster", *arguments],
            capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT,
            env={**os.environ, "TIDEWHEEL_RUN_DIR": str(self.run_dir), **(variables or {})},
        )  # fmt: skip

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command, and do not wait for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "tidewheel.cli.main", "cluster", *arguments],
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "TIDEWHEEL_RUN_DIR": str(self.run_dir)},
        )

    def chat(self, content: str, **fields: Any) -> requests.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
        return requests.post(
            f"{self.url}/v1/chat/completions", json=body, timeout=300, stream=bool(fields.get("stream"))
        )

    def replicas(self) -> list[psutil.Process]:
        """Return the actors of replicas."""
        return self.processes("ray::ServeReplica:tidewheel:replica")

    def tritons(self) -> list[psutil.Process]:
        return self.processes("/tritonserver --", str(self.run_dir))

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return those that were started below this cluster's folder, with the words in their command."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it may end at any moment
                is_ours = one.environ().get("TIDEWHEEL_RUN_DIR", "").startswith(str(self.run_dir / "cluster"))
                command = " ".join(one.cmdline())
                if is_ours and one.status() != psutil.STATUS_ZOMBIE and all(word in command for word in words):
                    found.append(one)
        return found

    def listening(self) -> list[int]:
        pids = {one.pid for one in self.processes()}
        return [one.laddr.port for one in psutil.net_connections("tcp") if one.pid in pids and one.status == "LISTEN"]

    def is_ready(self, num_replicas: int) -> bool:
        """Return whether the gateway sees so many ready replicas, and no other."""
        with contextlib.suppress(requests.RequestException):
            text = self.session.get(f"{self.url}/metrics", timeout=60).text
            states = [sample.value for sample in Figures.parse(text).samples(UPSTREAM_READY.name)]
            return states == [1.0] * num_replicas
        return False

    def wait_ready(self, num_replicas: int) -> None:
        wait_for(lambda: self.is_ready(num_replicas), LIMIT_S, f"{num_replicas} replicas")


@dataclass
class Streamed:
    """What a client saw of one stream."""

    text: str = ""
    errors: list[dict[str, Any]] = field(default_factory=list)
    status: int = 0
    is_done: bool = False
    is_broken: bool = False  # its connection ended before it
    last_news_s: float = 0.0  # on the monotonic clock

    def read(self, cluster: RunningCluster, content: str, **fields: Any) -> Streamed:
        with cluster.chat(content, stream=True, **fields) as answer:
            self.status = answer.status_code
            if not answer.ok:
                self.errors.append(answer.json())
                return self
            try:
                for line in answer.iter_lines(chunk_size=1):
                    if line.startswith(b"data: "):
                        self.take(line.removeprefix(b"data: "))
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                self.is_broken = True
        return self

    def take(self, data: bytes) -> None:
        self.last_news_s = time.monotonic()
        if data == b"[DONE]":
            self.is_done = True
            return
        news = json.loads(data)
        if "error" in news:
            self.errors.append(news)
        elif news["choices"]:
            self.text += news["choices"][0]["delta"].get("content") or ""


@contextlib.contextmanager
def up(run_dir: Path, *arguments: str) -> Iterator[RunningCluster]:
    """Start it, and end it with the block if it is not down."""
    cluster = RunningCluster(run_dir)
    try:
        done = cluster.command("up", "--openai-port", "0", *arguments)
        assert done.returncode == 0, done.stderr
        cluster.port = int(done.stdout.splitlines()[0].rpartition(":")[2].removesuffix("/v1"))
        yield cluster
    finally:
        cluster.session.close()
        cluster.command("down")
