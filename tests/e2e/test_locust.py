"""A short run of all kinds of locust users against the real server: no failure, and both sides count the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.triton.serving import Server, wait_for

pytestmark = pytest.mark.e2e

LOCUSTFILE = Path(__file__).parents[2] / "client" / "tidewheel_client" / "load" / "locustfile.py"
NUM_USERS = 30


def succeeded(server: Server, model: str) -> float:
    return server.metric("vllm:request_success_total", model_name=model, finished_reason="length")


def num_tokens(server: Server) -> float:
    return server.metric("vllm:generation_tokens_total")


class Rows:
    """Statistics that locust printed."""

    def __init__(self, server: Server, seconds: int) -> None:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--json"]
        command += ["-u", str(NUM_USERS), "-r", str(NUM_USERS), "-t", f"{seconds}s", "--stop-timeout", "60"]
        command += ["--host", server.http, "--grpc-url", server.grpc]
        command += ["--qos-mix", "critical=1,normal=3,low=1", "--tenants", "a=2,b=1", "--output-tokens", "8"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        self._rows = json.loads(done.stdout)
        assert sum(row["num_failures"] for row in self._rows) == 0

    def count(self, kind: str, prefix: str = "") -> int:
        found = (row for row in self._rows if row["method"] == kind and row["name"].startswith(prefix))
        return sum(row["num_requests"] for row in found)


def test_locust_and_the_server_count_the_same(server: Server) -> None:
    models = ("demo", "demo_infer")
    for seconds in (5, 20, 80):  # a busy machine takes longer to begin
        before = {model: succeeded(server, model) for model in models}
        tokens_before = num_tokens(server)
        rows = Rows(server, seconds)
        streamed, whole = rows.count("GRPC") + rows.count("SSE"), rows.count("INFER")

        def counts_agree() -> bool:  # the server publishes its figures a few times a second
            found = {model: succeeded(server, model) - before[model] for model in models}  # noqa: B023
            return found == {"demo": streamed, "demo_infer": whole}  # noqa: B023

        wait_for(counts_agree, 60, f"the server to count {streamed} and {whole} requests")
        assert num_tokens(server) - tokens_before == 8 * (streamed + whole)
        assert rows.count("TTFT") == rows.count("TPOT") == streamed
        assert rows.count("GRPC") == rows.count("TTFT", "GRPC") and rows.count("SSE") == rows.count("TTFT", "SSE")
        if min(rows.count("GRPC"), rows.count("SSE"), whole) >= NUM_USERS // 3:
            return
    pytest.fail("locust hardly sent anything in 80 s")
