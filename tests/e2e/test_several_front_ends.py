"""An entry with several instances: front ends of one engine, which share its streams and its limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest
import requests

from support.triton.burst import PROMPTS, Burst, bursting
from support.triton.serving import Server, serving_demo, wait_for
from tidewheel_client import Client

pytestmark = pytest.mark.e2e

Reference = Callable[[str, int], tuple[list[int], list[int], str]]

NUM_FRONT_ENDS = 3
NUM_STREAMS = 16  # no more than may wait
MAX_RUNNING, MAX_WAITING = 8, 16
CONFIG = f"""
backend: "tidewheel"
instance_group [ {{ count: {NUM_FRONT_ENDS} kind: KIND_CPU }} ]
parameters {{ key: "model" value {{ string_value: "weights" }} }}
parameters {{ key: "kv_cache_memory_mb" value {{ string_value: "64" }} }}
parameters {{ key: "dtype" value {{ string_value: "float32" }} }}
parameters {{ key: "max_num_seqs" value {{ string_value: "{MAX_RUNNING}" }} }}
parameters {{ key: "max_waiting_requests" value {{ string_value: "{MAX_WAITING}" }} }}
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_demo(tmp_path_factory.mktemp("several"), CONFIG) as server:
        yield server


def front_ends(server: Server) -> list[psutil.Process]:
    return [process for process in server.processes("python_backend_stub") if process.cpu_times().user > 0.1]


def is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(server.metric(name, model_name="demo") for name in names)


def finish(burst: Burst, count: int) -> dict[str, str]:
    sent = {burst.send(PROMPTS[i % len(PROMPTS)], 24): PROMPTS[i % len(PROMPTS)] for i in range(count)}
    burst.finish()
    return sent


def test_streams_are_exact_spread_and_counted_once(several: Server, reference: Reference) -> None:
    expected = {prompt: reference(prompt, 24)[1] for prompt in PROMPTS}
    assert len(several.processes("--engine-dir")) == 1
    before = {process.pid: sum(process.cpu_times()[:2]) for process in front_ends(several)}
    finished = several.metric("vllm:request_success_total", model_name="demo")
    with bursting(several) as burst:
        sent = finish(burst, NUM_STREAMS)
        assert not burst.errors
        for request_id, prompt in sent.items():
            assert burst.tokens[request_id] == expected[prompt]
    worked = [process.pid for process in front_ends(several) if sum(process.cpu_times()[:2]) > before[process.pid]]
    assert len(worked) >= 2
    wait_for(
        lambda: several.metric("vllm:request_success_total", model_name="demo") == finished + NUM_STREAMS,
        60,
        "every request counted, once",
    )
    wait_for(lambda: is_idle(several), 60, "an idle engine")


def test_the_bound_of_the_waiting_set_is_that_of_all(several: Server) -> None:
    with bursting(several) as burst:
        for index in range(4 * (MAX_RUNNING + MAX_WAITING)):
            burst.send(PROMPTS[index % len(PROMPTS)], 64)
        burst.finish()
        assert burst.errors and all("TW-BUSY" in error for error in burst.errors)
        assert burst.num_sent - len(burst.errors) >= MAX_WAITING
    wait_for(lambda: is_idle(several), 60, "an idle engine")


def test_cancels_reach_the_engine_through_each(several: Server) -> None:
    with bursting(several, num_clients=2) as burst:
        for index in range(MAX_RUNNING + 4):
            burst.send(PROMPTS[index % len(PROMPTS)], 2000)
        wait_for(lambda: several.metric("vllm:num_requests_running", model_name="demo") > 0, 60, "running requests")
    wait_for(lambda: is_idle(several), 60, "an engine without the cancelled requests")


def test_a_session_goes_on_at_any_of_them(several: Server) -> None:
    with Client(several.grpc, model="demo") as client:
        for turn in range(6):
            client.generate("The Python interpreter " * (turn + 1), session_id="chat", max_tokens=4)
        client.close_session("chat")
    assert requests.get(f"{several.http}/v2/health/ready", timeout=60).ok
