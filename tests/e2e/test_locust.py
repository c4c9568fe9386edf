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


def test_locust_and_the_server_count_the_same(server: Server) -> None:
    models = ("demo", "demo_infer")
    before = {model: succeeded(server, model) for model in models}
    tokens_before = num_tokens(server)
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--json"]
    command += ["-u", str(NUM_USERS), "-r", str(NUM_USERS), "-t", "5s", "--stop-timeout", "60"]
    command += ["--host", server.http, "--grpc-url", server.grpc]
    command += ["--qos-mix", "critical=1,normal=3,low=1", "--tenants", "a=2,b=1", "--output-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert sum(row["num_failures"] for row in rows) == 0

    def count(kind: str, prefix: str = "") -> int:
        found = (row for row in rows if row["method"] == kind and row["name"].startswith(prefix))
        return sum(row["num_requests"] for row in found)

    streamed, whole = count("GRPC") + count("SSE"), count("INFER")
    assert min(count("GRPC"), count("SSE"), whole) >= NUM_USERS // 3
    assert count("TTFT") == count("TPOT") == streamed
    assert count("GRPC") == count("TTFT", "GRPC") and count("SSE") == count("TTFT", "SSE")

    def counts_agree() -> bool:  # the server publishes its figures a few times a second
        found = {model: succeeded(server, model) - before[model] for model in models}
        return found == {"demo": streamed, "demo_infer": whole}

    wait_for(counts_agree, 60, f"the server to count {streamed} and {whole} requests")
    assert num_tokens(server) - tokens_before == 8 * (streamed + whole)
