"""Triton's own queue before a full waiting set: its priorities, its bounds and its time limits are real."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from support.faults.slowed import slowed_by
from support.triton.serving import (
    Server,
    grpc_inputs,
    serving_demo,
    wait_for,
)

pytestmark = pytest.mark.e2e

MAX_QUEUE_SIZE = 3  # of each priority level
# One request runs, one may wait: all others stay in Triton's queue.
CONFIG = """
backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "kv_cache_memory_mb" value { string_value: "64" } }
parameters { key: "max_num_seqs" value { string_value: "1" } }
parameters { key: "max_waiting_requests" value { string_value: "1" } }
dynamic_batching {
  priority_levels: 4
  default_priority_level: 3
  default_queue_policy { max_queue_size: 3 default_timeout_microseconds: 60000000 allow_timeout_override: true }
}
"""


@pytest.fixture(scope="module")
def queued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its steps are slow: a long request goes on for 80 s unless it is cancelled."""
    folder, slowed = tmp_path_factory.mktemp("queued"), slowed_by(0.08, tmp_path_factory.mktemp("slow") / "seconds")
    with serving_demo(folder, CONFIG, "--allow-faults", variables=slowed) as server:
        yield server


class Caller:
    """Requests over streams of their own, and the order in which they end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._ended: queue.Queue[tuple[str, str]] = queue.Queue()  # name, and how
        self._clients: dict[str, grpcclient.InferenceServerClient] = {}

    def send(self, name: str, *, max_tokens: int = 4, parameters: str = "{}", **options: Any) -> None:
        client = grpcclient.InferenceServerClient(self.server.grpc)
        self._clients[name] = client
        client.start_stream(callback=lambda result, error: self._note(name, result, error))
        inputs = grpc_inputs(
            "The server",
            max_tokens=max_tokens,
            ignore_eos=True,
            return_finish_reason=True,
            sampling_parameters=parameters,
        )
        client.async_stream_infer("demo", inputs, **options)

    def cancel(self, name: str) -> None:
        self._clients.pop(name).stop_stream(cancel_requests=True)

    def wait(self, *names: str) -> dict[str, str]:
        """How the requests ended, in the order in which they did; others that end meanwhile are forgotten."""
        ended: dict[str, str] = {}
        while not ended.keys() >= set(names):
            name, how = self._ended.get(timeout=60)
            if name in names:
                ended[name] = how
        return ended

    def close(self) -> None:
        for client in self._clients.values():
            client.stop_stream(cancel_requests=True)
            client.close()

    def _note(self, name: str, result: Any, error: Any) -> None:
        how = error.message() if error is not None else result.as_numpy("finish_reason")[0].decode()
        self._ended.put((name, how))


@pytest.fixture
def caller(queued: Server) -> Iterator[Caller]:
    """One request runs for long and one waits for it: nobody else can come in."""
    one = Caller(queued)
    one.send("runs", max_tokens=1000)
    wait_for(lambda: queued.metric("vllm:num_requests_running") == 1, 60, "a running request")
    one.send("waits")
    wait_for(lambda: queued.metric("vllm:num_requests_waiting") == 1, 60, "a waiting request")
    yield one
    one.close()
    wait_for(lambda: num_at_engine(queued) == num_pending(queued) == 0, 60, "an idle server")
    wait_for(lambda: queued.metric("vllm:kv_cache_usage_perc") == 0, 60, "all blocks given back")


def num_at_engine(server: Server) -> float:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def num_received(server: Server) -> float:
    return server.metric("tidewheel_requests_received_total")


def num_pending(server: Server) -> float:
    return server.metric("nv_inference_pending_request_count", model="demo")


def wait_pending(server: Server, count: int) -> None:
    wait_for(lambda: num_pending(server) == count, 60, f"{count} requests in Triton's queue")


def test_a_better_priority_overtakes(queued: Server, caller: Caller) -> None:
    for index, name in enumerate(("low 1", "low 2", "low 3"), start=1):
        caller.send(name, priority=3)
        wait_pending(queued, index)
    caller.send("high", priority=1)
    wait_pending(queued, 4)
    caller.cancel("runs")
    ended = caller.wait("waits", "high", "low 1", "low 2", "low 3")
    assert list(ended) == ["waits", "high", "low 1", "low 2", "low 3"]
    assert set(ended.values()) == {"length"}


def test_a_priority_beyond_the_levels_is_the_default_level(queued: Server, caller: Caller) -> None:
    """Triton's own rule: the model is not told the priority."""
    for index, (name, priority) in enumerate({"low": 4, "nine": 9, "high": 2}.items(), start=1):
        caller.send(name, priority=priority)
        wait_pending(queued, index)
    caller.cancel("runs")
    assert list(caller.wait("waits", "high", "nine", "low")) == ["waits", "high", "nine", "low"]


def test_the_bound_of_the_queue_refuses(queued: Server, caller: Caller) -> None:
    for index in range(MAX_QUEUE_SIZE):
        caller.send(f"queued {index}")
        wait_pending(queued, index + 1)
    caller.send("too many")
    (how,) = caller.wait("too many").values()
    assert "Exceeds maximum queue size" in how
    caller.send("of another level", priority=2)
    wait_pending(queued, MAX_QUEUE_SIZE + 1)
    caller.cancel("runs")
    names = [f"queued {index}" for index in range(MAX_QUEUE_SIZE)]
    assert set(caller.wait("of another level", *names).values()) == {"length"}


def test_a_request_that_waits_too_long_is_rejected(queued: Server, caller: Caller) -> None:
    received = num_received(queued)
    caller.send("impatient", timeout=1)  # µs: over when Triton looks
    wait_pending(queued, 1)
    caller.send("patient")
    wait_pending(queued, 2)
    caller.cancel("runs")
    ended = caller.wait("impatient", "patient")
    assert "timeout expired" in ended["impatient"].lower()
    assert ended["patient"] == "length"
    wait_for(lambda: num_received(queued) == received + 1, 60, "the count of those that came")


def test_a_request_cancelled_in_the_queue_never_reaches_the_model(queued: Server, caller: Caller) -> None:
    """Triton drops it when it looks at its queue again: no instance is free before."""
    received = num_received(queued)
    for index in range(MAX_QUEUE_SIZE):
        caller.send(f"queued {index}")
        wait_pending(queued, index + 1)
    caller.cancel("queued 1")
    caller.cancel("runs")
    ended = caller.wait("waits", "queued 0", "queued 2")
    assert list(ended.items()) == [("waits", "length"), ("queued 0", "length"), ("queued 2", "length")]
    wait_pending(queued, 0)
    wait_for(lambda: num_received(queued) == received + MAX_QUEUE_SIZE - 1, 60, "the count of those that came")


def test_a_cancelled_request_frees_its_place_at_the_engine(queued: Server, caller: Caller) -> None:
    """It was let in, and what it leaves is free for the next at once, though nothing else ends."""
    caller.send("next")
    wait_pending(queued, 1)
    caller.cancel("waits")
    wait_pending(queued, 0)
    wait_for(lambda: num_at_engine(queued) == 2, 60, "the next one in its place")


def test_a_deadline_holds_behind_the_gate(queued: Server, caller: Caller) -> None:
    received = num_received(queued)
    caller.cancel("waits")
    caller.send("hurries", parameters='{"deadline_ms": 300}')
    wait_for(lambda: num_received(queued) == received + 1, 60, "the first of two in the place that is free")
    caller.send("next")
    (how,) = caller.wait("hurries").values()
    assert how.startswith("[TW-DEADLINE]")
    caller.cancel("runs")
    assert caller.wait("next") == {"next": "length"}
