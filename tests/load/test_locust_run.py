"""The locustfile as locust runs it: in a process of its own, under gevent, against servers that answer nobody before
everybody has asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import requests

from support.triton.grpc_triton import Answer, Asked, FakeTriton
from support.triton.grpc_triton import say_words as say_words_over_grpc
from support.triton.http_triton import Body, FakeHttpTriton, one_answer
from support.triton.serving import free_ports, wait_for

LOCUSTFILE = Path(__file__).parents[2] / "client" / "tidewheel_client" / "load" / "locustfile.py"
# On a busy machine, locust gives up a worker after three seconds, and with it what the worker has counted.
PATIENT = "from locust import main, runners; runners.HEARTBEAT_LIVENESS = 100; main.main()"
LOCUST = [sys.executable, "-c", PATIENT, "-f", str(LOCUSTFILE)]
NUM_USERS = 12


def run_locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*LOCUST, "--headless", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "LOCUST_SKIP_MONKEY_PATCH"}


def rows(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    # Workers print an empty list each, wherever it falls.
    text = done.stdout.replace("[]", "")
    return {(row["method"], row["name"]): row for row in json.loads(text)}


class Everybody:
    """Holds the first requests until so many are there. Without gevent's help in gRPC, one waiting call stops all."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._there = threading.Event()

    def wait(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._there.set()
        assert self._there.wait(60), f"{self._left} requests did not come"


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["one process", "two processes"])
def test_all_users_at_once(triton: FakeTriton, http_triton: FakeHttpTriton, processes: tuple[str, ...]) -> None:
    everybody = Everybody(NUM_USERS)

    def over_grpc(asked: Asked) -> Answer:
        everybody.wait()
        return say_words_over_grpc(asked)

    def over_http(body: Body) -> Body:
        everybody.wait()
        return one_answer(body)

    triton.answer, http_triton.answer = over_grpc, over_http
    say = http_triton.events
    http_triton.events = lambda body: (everybody.wait(), say(body))[1]
    done = run_locust(
        *("-u", str(NUM_USERS), "-r", "100", "-t", "4s", "--stop-timeout", "30", "--json", *processes),
        *("--grpc-url", f"127.0.0.1:{triton.port}", "--host", http_triton.url),
        *("--think-time", "0.05-0.1", "--qos-mix", "high,low", "--prompt-words", "3"),
    )
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert sum(row["num_failures"] for row in found.values()) == 0
    asked = {
        "GRPC": len(triton.asked),
        "SSE": sum(path.endswith("_stream") for path, _ in http_triton.asked),
        "INFER": sum(path.endswith("/infer") for path, _ in http_triton.asked),
    }
    counted = dict.fromkeys(asked, 0)
    for (method, _), row in found.items():
        if method in counted:
            counted[method] += row["num_requests"]
    for kind, count in asked.items():
        assert count >= NUM_USERS / 3
        assert 0 <= count - counted[kind] <= NUM_USERS / 3  # at the end, locust stops users that have just asked
    for kind in ("GRPC", "SSE"):
        for row in ("TTFT", "TPOT"):
            named = {f"{kind} demo {qos}" for qos in ("high", "low")}  # few requests may be all of one class
            counts = [found[key]["num_requests"] for key in found if key[0] == row and key[1] in named]
            assert sum(counts) == counted[kind]


def test_failures_make_the_exit_code(http_triton: FakeHttpTriton) -> None:
    url = http_triton.url
    http_triton.__exit__(None, None, None)
    done = run_locust(
        "-u", "1", "-t", "3s", "--stop-timeout", "30", "--think-time", "0.1", "--json", "--host", url, "HttpInferUser"
    )
    assert done.returncode == 1
    assert "first ServerUnavailable of INFER users" in done.stderr
    http_triton.__enter__()


def test_a_wrong_option_of_the_web_page_ends_the_test(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "locust.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*LOCUST, "--web-host", "127.0.0.1", "--web-port", str(port)], stderr=output, env=environment()
        )
    try:
        body = {"user_count": 3, "spawn_rate": 3, "qos_mix": "hi"}
        wait_for(lambda: answers(f"{url}/"), 60, "web page")
        assert requests.post(f"{url}/swarm", data=body, timeout=30).json()["success"]
        wait_for(lambda: "hi is no QoS class" in log.read_text(), 60, "the reason in the log")
        wait_for(lambda: requests.get(f"{url}/stats/requests", timeout=30).json()["state"] == "stopped", 60, "end")
    finally:
        process.terminate()
        process.wait(30)
    text = log.read_text()
    assert text.count("hi is no QoS class") == 1
    assert "Traceback" not in text


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=30).ok
    except requests.ConnectionError:
        return False


def test_a_wrong_option_is_one_line() -> None:
    done = run_locust("--output-tokens", "0-5")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].endswith("write whole numbers from 1")


@pytest.mark.parametrize("user", ["GrpcStreamUser", "HttpStreamUser"])
def test_without_a_server_it_stops_at_once_with_the_address(user: str) -> None:
    (port,) = free_ports(1)
    where = ["--grpc-url", f"127.0.0.1:{port}"] if user.startswith("Grpc") else ["--host", f"http://127.0.0.1:{port}"]
    done = run_locust("-u", "2", "-r", "2", "-t", "100s", *where, user)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: start one with 'tidewheel serve'" in done.stderr
    assert "no server answers at" in done.stderr
