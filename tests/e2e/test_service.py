"""Sequences, deadlines, sessions, tenants and a full waiting set, as clients of a running server see them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from support.faults.slowed import slowed_by
from support.triton.serving import (
    Server,
    StreamError,
    grpc_inputs,
    grpc_stream,
    serving_demo,
    texts,
    wait_for,
)
from tidewheel_client import Busy, Client, DeadlineExceeded, NotFound, Stream

pytestmark = pytest.mark.e2e

# One request runs and two may wait; one tenant has next to nothing.
CONFIG = """
backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "kv_cache_memory_mb" value { string_value: "64" } }
parameters { key: "max_num_seqs" value { string_value: "1" } }
parameters { key: "max_waiting_requests" value { string_value: "2" } }
parameters { key: "tenants" value { string_value: "{\\"poor\\": {\\"requests_per_s\\": 0.01}}" } }
"""
LONG: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its steps are slow: a long request goes on for 20 s unless it is cancelled."""
    folder, slowed = tmp_path_factory.mktemp("narrow"), slowed_by(0.02, tmp_path_factory.mktemp("slow") / "seconds")
    with serving_demo(folder, CONFIG, "--allow-faults", variables=slowed) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    with Client(getattr(server, request.param), timeout_s=60) as one:
        yield one


@pytest.fixture(params=["grpc", "http"])
def busy(request: pytest.FixtureRequest, narrow: Server) -> Iterator[Client]:
    """A client of a server whose one row is taken for long."""
    with (
        Client(getattr(narrow, request.param), timeout_s=60) as one,
        one.stream("The server", **LONG) as running,
    ):
        next(running)
        yield one
    wait_for(lambda: num_at_engine(narrow) == 0, 60, "an idle server")
    wait_for(lambda: narrow.metric("vllm:kv_cache_usage_perc") == 0, 60, "all blocks given back")


def num_at_engine(server: Server) -> float:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def wait_waiting(server: Server, count: int) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_waiting") == count, 60, f"{count} waiting requests")


# --- sequences ----------------------------------------------------------------------------------------------------


def alone(client: Client, seeds: range) -> list[str]:
    return [client.generate("A tuple is", seed=seed, **SAMPLED).text for seed in seeds]


def test_sequences_in_one_response(client: Client) -> None:
    answers = client.generate_all("A tuple is", n=3, seed=5, return_token_ids=True, **SAMPLED)
    assert [answer.text for answer in answers] == alone(client, range(5, 8))
    assert [len(answer.token_ids or ()) for answer in answers] == [12] * 3
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_sequences_as_a_stream(client: Client) -> None:
    stream = client.stream("A tuple is", n=3, seed=5, **SAMPLED)
    answers = stream.read_all()
    assert [answer.text for answer in answers] == alone(client, range(5, 8))
    assert [answer.num_output_tokens for answer in answers] == [12] * 3
    assert stream.finish_reason == "length"


def test_sequences_as_tensors(server: Server) -> None:
    """Elements without news are empty texts."""
    inputs = grpc_inputs("A tuple is", stream=True, sampling_parameters='{"n": 2, "max_tokens": 5}')
    for result in grpc_stream(server, inputs):
        assert result.as_numpy("text_output").shape == (2,)
    answer = server.post("demo_infer/generate", {"text_input": "A tuple is", "n": 2, **SHORT, **GREEDY}).json()
    assert answer["text_output"] == [server.generate("A tuple is", **SHORT, **GREEDY)["text_output"]] * 2


def test_a_stop_string_in_one_of_two(client: Client) -> None:
    first, second = (answer.text for answer in client.generate_all("A tuple is", n=2, seed=5, **SAMPLED))
    stop = next(piece for i in range(4, len(first)) if (piece := first[i : i + 4]) not in second)
    cut, whole = client.generate_all("A tuple is", n=2, seed=5, stop=stop, **SAMPLED)
    assert (cut.text, cut.finish_reason) == (first[: first.index(stop)], "stop")
    assert (whole.text, whole.finish_reason) == (second, "length")


def test_more_sequences_than_rows(narrow: Server) -> None:
    with Client(narrow.grpc, timeout_s=60) as client:
        assert len(client.generate_all("A tuple is", n=2, **SHORT)) == 2


# --- deadlines ----------------------------------------------------------------------------------------------------


T = TypeVar("T")


def within_its_run(ask: Callable[[int], T]) -> T:
    """Ask with twice the deadline (ms) each time, until a token comes before it: a busy machine starts late."""
    for deadline_ms in (100, 200, 400, 800, 1600):
        try:
            return ask(deadline_ms)
        except (DeadlineExceeded, StreamError) as error:
            assert "TW-DEADLINE" in str(error)
    return ask(3200)


def test_a_deadline_while_it_runs(client: Client) -> None:
    answer = within_its_run(lambda deadline_ms: client.generate("Databases are", deadline_ms=deadline_ms, **LONG))
    assert answer.finish_reason == "deadline"
    assert 0 < (answer.num_output_tokens or 0) < 1000
    assert answer.text


def test_tritons_timeout_is_a_deadline(server: Server) -> None:
    inputs = grpc_inputs("Databases are", return_finish_reason=True, **LONG)
    (result,) = within_its_run(lambda deadline_ms: grpc_stream(server, inputs, timeout=deadline_ms * 1000))
    assert result.as_numpy("finish_reason").tolist() == [b"deadline"]
    assert texts([result])[0] > "Databases are"


def test_a_deadline_in_the_queue(narrow: Server, busy: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        busy.generate("Hello", deadline_ms=300, **SHORT)
    with pytest.raises(StreamError, match=r"^\[TW-DEADLINE\]"):
        grpc_stream(narrow, grpc_inputs("Hello", **SHORT), timeout=300_000)


# --- who may wait -------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_rate_is_told_when_to_come_again(narrow: Server) -> None:
    with Client(narrow.grpc, timeout_s=60) as client:
        client.generate("Hello", tenant="poor", **SHORT)
        with pytest.raises(Busy, match="poor") as error:
            client.generate("Hello", tenant="poor", **SHORT)
        assert (error.value.retry_after_ms or 0) > 1000
        client.generate("Hello", tenant="rich", **SHORT)
    wait_for(lambda: narrow.metric("tidewheel_requests_rate_limited_total") >= 1, 60, "the count of refusals")


def test_a_better_class_takes_the_place_of_the_newest_of_the_lowest(narrow: Server, busy: Client) -> None:
    low = []
    for count in (1, 2):
        low.append(busy.stream("Hello", priority=4, **SHORT))
        wait_waiting(narrow, count)
    with pytest.raises(Busy, match="waiting set is full: 2 of 2 requests"):
        busy.generate("Hello", priority=4, **SHORT)
    with busy.stream("Hello", priority=1, **SHORT) as critical:
        with pytest.raises(Busy, match="took the place"):
            low[1].read()
        # It cannot wait for the one row, whose owner is of a lower class.
        assert critical.read().finish_reason == "length"
    wait_for(lambda: narrow.metric("tidewheel_requests_evicted_total", **{"class": "low"}) >= 1, 60, "the count")
    low[0].cancel()


@pytest.mark.parametrize("busy", ["grpc"], indirect=True)  # by HTTP, Triton sees it at the next text, which none has
def test_a_cancelled_request_frees_its_place(narrow: Server, busy: Client) -> None:
    waiting = queue.SimpleQueue[Stream]()
    for count in (1, 2):
        waiting.put(busy.stream("Hello", **SHORT))
        wait_waiting(narrow, count)
    waiting.get().cancel()
    wait_waiting(narrow, 1)
    with busy.stream("Hello", **SHORT):
        wait_waiting(narrow, 2)
    waiting.get().cancel()


# --- sessions -----------------------------------------------------------------------------------------------------


def test_the_second_turn_of_a_session_pays_for_its_new_tokens(server: Server, client: Client) -> None:
    session: dict[str, Any] = {
        "session_id": "chat 1",
        "tenant": "acme",
        "cache_salt": client.url,
        "return_perf_metrics": True,
        "ignore_eos": True,
        **GREEDY,
    }
    left_by_others = server.metric("tidewheel_sessions", model_name="demo")
    first = client.generate(input_ids=list(range(100, 200)), max_tokens=20, return_token_ids=True, **session)
    assert first.perf is not None and first.perf.kv_cache_reused_blocks == 0
    prompt = [*range(100, 200), *(first.token_ids or ()), *range(300, 310)]
    again = client.generate(input_ids=prompt, max_tokens=4, return_token_ids=True, **session)
    fresh = client.generate(input_ids=prompt, max_tokens=4, return_token_ids=True, **{**session, "tenant": "other"})
    assert again.perf is not None and fresh.perf is not None
    # 119 tokens are kept, 7 full blocks of 16 and a part of the next: 130 + 4 tokens fill 9.
    assert again.perf.kv_cache_reused_blocks >= 7
    assert again.perf.kv_cache_alloc_new_blocks <= 2
    assert fresh.perf.kv_cache_reused_blocks == 0
    assert again.token_ids == fresh.token_ids
    wait_for(lambda: server.metric("tidewheel_sessions", model_name="demo") >= 2, 60, "two sessions")
    for tenant in ("acme", "other"):
        client.close_session("chat 1", tenant=tenant)
    wait_for(lambda: server.metric("tidewheel_sessions", model_name="demo") <= left_by_others, 60, "no session")


def test_closing_a_session_that_is_not_there(server: Server, client: Client) -> None:
    with pytest.raises(NotFound, match="nobody"):
        client.close_session("nobody")
    body = {"close_session": True, "session_id": "nobody", "text_input": ""}
    response = server.post("demo/generate", body)
    assert response.status_code >= 400
    assert "[TW-NOT-FOUND]" in response.text
