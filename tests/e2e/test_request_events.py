"""The request log and the traces of a real server under a mixed load."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.faults.slowed import slow_down, slowed_by
from support.triton.burst import bursting
from support.triton.otlp_collector import Collector, attributes, collecting
from support.triton.serving import (
    WEIGHTS,
    Server,
    StreamError,
    grpc_inputs,
    grpc_stream,
    serving_demo,
    token_ids,
    wait_for,
)
from tidewheel_client.errors import Busy, KvCacheFull, from_text

pytestmark = pytest.mark.e2e

SECRET = "xylophone"
CONFIG = f"""
backend: "tidewheel"
parameters {{ key: "model" value {{ string_value: "{WEIGHTS}" }} }}
parameters {{ key: "dtype" value {{ string_value: "float32" }} }}
parameters {{ key: "max_num_seqs" value {{ string_value: "4" }} }}
parameters {{ key: "max_waiting_requests" value {{ string_value: "8" }} }}
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "return_num_input_tokens": True}


def setting(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


class Seen(NamedTuple):
    """What a client has seen of a request."""

    error: str
    num_responses: int
    num_tokens: int
    num_prompt_tokens: int | None


def ask(
    server: Server, request_id: str, stream: bool = True, headers: dict[str, str] | None = None, **tensors: Any
) -> Seen:
    text = f"The {SECRET} {request_id}"
    inputs = grpc_inputs(**{"text_input": text, "stream": stream, **GREEDY, **tensors})
    try:
        results = grpc_stream(server, inputs, headers=headers, request_id=request_id)
    except StreamError as error:
        return Seen(str(error).split("]")[0].split()[0].strip("[]"), 0, 0, None)
    return Seen("", len(results), len(token_ids(results)), int(results[-1].as_numpy("num_input_tokens")[0]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra tracing")
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Path, collector: Collector) -> Iterator[Server]:
    settings = setting("request_log", str(log)) + setting("otlp_traces_endpoint", collector.url)
    forward = "--triton-arg=--grpc-header-forward-pattern=traceparent"
    with serving_demo(tmp_path_factory.mktemp("events"), CONFIG + settings, forward) as running:
        yield running


def test_every_request_has_one_line_with_what_its_client_saw(server: Server, log: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        **{f"stream{i}": {"max_tokens": 20 + i, "sampling_parameters": '{"tenant": "acme"}'} for i in range(8)},
        **{f"whole{i}": {"max_tokens": 5, "stream": False} for i in range(4)},
        "two": {"max_tokens": 6, "stream": False, "sampling_parameters": '{"n": 2}'},
        "class": {"max_tokens": 3, "sampling_parameters": '{"priority": 1, "session_id": "s", "deadline_ms": 60000}'},
        "stops": {"max_tokens": 500, "sampling_parameters": '{"stop": ["e"]}'},
        "wrong": {"max_tokens": -5},
        "unreadable": {"sampling_parameters": f'{{"{SECRET}'},
        "large": {"text_input": "x" * (5 << 20)},
        "late": {"max_tokens": 5, "sampling_parameters": '{"deadline_ms": 0.001}'},
    }
    with ThreadPoolExecutor(6) as pool:
        answers = dict(zip(asked, pool.map(lambda item: ask(server, item[0], **item[1]), asked.items()), strict=True))
    wait_for(lambda: len(lines(log)) >= len(asked), 60, "a line for each request")
    found = {line["request_id"]: line for line in lines(log)}
    assert Counter(line["request_id"] for line in lines(log)) == dict.fromkeys(asked, 1)
    for request_id, seen in answers.items():
        line = found[request_id]
        assert (line["tag"] or "") == seen.error, line
        if not seen.error:
            assert (line["responses"], line["output_tokens"]) == (seen.num_responses, seen.num_tokens), line
            assert line["prompt_tokens"] == seen.num_prompt_tokens
    assert {seen.error for seen in answers.values()} == {"", "TW-INPUT", "TW-TOO-LARGE", "TW-DEADLINE"}
    assert all(found[f"stream{i}"]["tenant"] == "acme" for i in range(8))
    classed = found["class"]
    assert (classed["priority"], classed["session"], classed["deadline_ms"]) == ("CRITICAL", True, 60000)
    assert found["two"]["sequences"] == 2 and found["stops"]["finish_reason"] == "stop"
    first = found["stream0"]
    parts = [first[name] for name in ("queue_ms", "prefill_ms", "decode_ms")]
    assert min(parts) >= 0 and sum(parts) <= first["total_ms"] + 1
    assert first["queue_ms"] + first["prefill_ms"] == pytest.approx(first["first_token_ms"], abs=0.01)
    assert SECRET not in log.read_text() and log.stat().st_mode & 0o777 == 0o600


def test_a_flood_and_a_client_that_leaves_have_their_lines(server: Server, log: Path) -> None:
    before = len(lines(log))
    with ThreadPoolExecutor(40) as pool:
        seen = list(pool.map(lambda i: ask(server, f"flood{i}", max_tokens=30), range(40)))
    left = server.session.post(
        f"{server.http}/v2/models/demo/generate_stream",
        json={"id": "leaver", "text_input": SECRET, "stream": True, "max_tokens": 4000, "ignore_eos": True},
        stream=True,
        timeout=60,
    )
    next(left.iter_lines())
    left.close()
    wait_for(lambda: len(lines(log)) >= before + 41, 60, "a line for each request")
    new = {line["request_id"]: line for line in lines(log)[before:]}
    assert len(new) == len(lines(log)) - before == 41
    assert Counter(one.error for one in seen) == Counter(new[f"flood{i}"]["tag"] or "" for i in range(40))
    assert new["leaver"]["client_cancelled"] and new["leaver"]["finish_reason"] == "cancelled"


def traced_by(collector: Collector, request_id: str) -> Any:
    """Wait for the span of a request."""

    def found() -> list[Any]:
        return [root for root in collector.roots() if attributes(root).get("gen_ai.response.id") == request_id]

    (root,) = wait_for(found, 60, "the request's span")
    return root


@pytest.mark.parametrize("carrier", ["header of gRPC", "field of a body"])
def test_spans_continue_the_client_s_trace(server: Server, collector: Collector, carrier: str) -> None:
    """Server 2.51 passes no header of `/generate` on."""
    request_id, headers = carrier.replace(" ", "-"), {"traceparent": TRACEPARENT}
    if carrier == "header of gRPC":
        assert ask(server, request_id, max_tokens=5, headers=headers).error == ""
    else:
        answer = server.post("demo/generate", {"id": request_id, "text_input": SECRET, "max_tokens": 5, **headers})
        assert answer.status_code == 200, answer.text
    root = traced_by(collector, request_id)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, TRACEPARENT.split("-")[2])
    assert attributes(root)["gen_ai.usage.output_tokens"] == 5
    wait_for(lambda: len(collector.stages(root)) == 4, 60, "its stages")
    stages = [collector.stages(root)[name] for name in ("queue", "prefill", "decode", "send")]
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(stages))
    assert root.start_time_unix_nano == stages[0].start_time_unix_nano
    assert root.end_time_unix_nano == stages[-1].end_time_unix_nano
    assert SECRET not in str(collector.spans)


def test_spans_continue_triton_s_trace(tmp_path: Path, collector: Collector) -> None:
    """Triton's own span of the request is the parent. Triton continues the client's trace in turn."""
    traces = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}")
    arguments = [f"--triton-arg=--trace-config={one}" for one in traces]
    with serving_demo(tmp_path, CONFIG + setting("otlp_traces_endpoint", collector.url), *arguments) as server:
        body = {"id": "by-triton", "text_input": "Hi", "max_tokens": 3}
        answer = server.post("demo/generate", body, headers={"traceparent": TRACEPARENT})
        assert answer.status_code == 200, answer.text
        root = traced_by(collector, "by-triton")
        assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() != TRACEPARENT.split("-")[2]

        def parents() -> list[dict[str, Any]]:
            return [span for span in collector.json_spans if span["spanId"] == root.parent_span_id.hex()]

        (parent,) = wait_for(parents, 60, "Triton's span")
    assert (parent["name"], parent["traceId"]) == ("demo", TRACE)


def test_a_full_cache_has_one_name_everywhere(tmp_path: Path) -> None:
    """Rows are free, and two long answers hold the blocks: refusals say so to client, log and metrics."""
    log = tmp_path / "requests.jsonl"
    small = {"num_blocks": "66", "block_size": "16", "admit_by_growth": "false", "request_log": str(log)}
    config = CONFIG + "".join(setting(name, value) for name, value in small.items())
    slowed = slowed_by(0.1, tmp_path / "seconds")  # the two hold them until all others are there
    serving = serving_demo(tmp_path / "repository", config, "--allow-faults", variables=slowed)
    with serving as server, bursting(server) as burst:
        for number in range(2):
            burst.send([3 + number, *range(5, 400)], 600)
        burst.receive_until_all_run()
        for number in range(8):
            burst.send([50 + number, *range(5, 400)], 4)
        wait_for(lambda: server.metric("vllm:num_requests_waiting", model_name="demo") >= 8, 60, "a full waiting set")
        for number in range(8):
            burst.send([150 + number, *range(5, 400)], 4)
        while not burst.errors:
            burst.receive()
        slow_down(tmp_path / "seconds", 0.0)
        burst.finish()
        refusals = [from_text(error) for error in burst.errors]
        named = [error for error in refusals if isinstance(error, KvCacheFull)]
        assert named and all(isinstance(error, Busy) and error.retry_after_ms for error in refusals)
        assert all(re.search(r"KV cache: \d+ must be free, and \d+ are$", error.message) for error in named)

        def tags() -> list[str]:
            return [line["tag"] for line in lines(log) if line["tag"]]

        wait_for(lambda: len(tags()) == len(refusals), 60, "a line for each")
        assert sorted(tags()) == sorted(error.tag for error in refusals)
        rejected = server.metric("tidewheel_requests_rejected_total", model_name="demo", tag="TW-KV-FULL")
        assert rejected == len(named)
