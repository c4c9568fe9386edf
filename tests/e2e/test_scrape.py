"""What a Prometheus server would scrape."""

from __future__ import annotations

import json
import re

import pytest
import requests

from support.triton.serving import Server, grpc_inputs, grpc_stream, wait_for

pytestmark = pytest.mark.e2e

GAUGES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:iteration_tokens_total",
    "tidewheel_refusal_seconds",
]
COUNTERS = [
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_success_total",
]


def test_names_and_labels(server: Server) -> None:
    server.generate("Hello", max_tokens=4)

    def all_there() -> bool:
        names = set(server.metrics().names)
        buckets = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
        return names >= {*GAUGES, *COUNTERS, *buckets, "nv_trt_llm_kv_cache_block_metrics"}

    wait_for(all_there, 60, "all metrics")
    figures = server.metrics()
    for sample in (one for name in figures.names if name.startswith("vllm:") for one in figures.samples(name)):
        assert {"model_name", "engine", "model", "version"} <= sample.labels.keys()


def settle(server: Server) -> None:
    """Until all that happened so far is published: of histograms a part with each refusal, which comes last."""
    before: dict[str, float] = {}
    while (counts := numbers_of_values(server)) != before:
        refuse(server)
        before = counts


def numbers_of_values(server: Server) -> dict[str, float]:
    names = [f"{name}_count" for name in HISTOGRAMS if name != "tidewheel_refusal_seconds"]
    return {name: server.metric(name, model_name="demo") for name in names}


def refuse(server: Server) -> None:
    before = server.metric("tidewheel_requests_rejected_total", tag="TW-UNSUPPORTED", model_name="demo")
    assert "[TW-UNSUPPORTED]" in server.post("demo/generate", {"text_input": "Hello", "best_of": 2}).text
    wait_for(
        lambda: server.metric("tidewheel_requests_rejected_total", tag="TW-UNSUPPORTED", model_name="demo") > before,
        60,
        "refusal in the metrics",
    )


def test_an_answered_client_sees_its_request_counted(server: Server) -> None:
    """No wait between the answer and the scrape."""
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 60, "an idle server")
    settle(server)
    names = {
        "vllm:prompt_tokens_total": 7, "vllm:generation_tokens_total": 22, "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1, "vllm:time_per_output_token_seconds_count": 20,
        "vllm:inter_token_latency_seconds_count": 20, "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1, "vllm:request_inference_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1, "vllm:request_decode_time_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 7, "vllm:request_generation_tokens_sum": 22,
        "vllm:request_generation_tokens_count": 2, "vllm:request_params_n_sum": 2, "vllm:request_params_n_count": 1,
    }  # fmt: skip
    parameters = json.dumps({"max_tokens": 11, "ignore_eos": True, "n": 2, "temperature": 1.0, "seed": 1})
    inputs = grpc_inputs(input_ids=list(range(20, 27)), sampling_parameters=parameters)
    for _ in range(3):
        before = {name: server.metric(name, model_name="demo") for name in names}
        assert grpc_stream(server, inputs)
        now = {name: server.metric(name, model_name="demo") for name in names}
        assert {name: now[name] - before[name] for name in names} == pytest.approx(names)


def test_steps_are_counted(server: Server) -> None:
    """The front end that owns the engine publishes them, which may be the twin's."""
    before = server.metric("tidewheel_scheduled_tokens_total")
    inputs = grpc_inputs(input_ids=list(range(20, 27)), sampling_parameters=json.dumps({"max_tokens": 11}))
    assert grpc_stream(server, inputs)
    wait_for(lambda: server.metric("tidewheel_scheduled_tokens_total") > before, 60, "steps")
    wait_for(
        lambda: (
            server.metric("vllm:iteration_tokens_total_sum")
            == pytest.approx(server.metric("tidewheel_scheduled_tokens_total"))
        ),
        60,
        "the histogram of the same steps",
    )


def test_histograms_are_cumulative(server: Server) -> None:
    server.generate("Hello", max_tokens=4)
    settle(server)
    figures = server.metrics()
    for name in HISTOGRAMS:
        buckets = figures.samples(f"{name}_bucket", model_name="demo")
        counts = [value for _, value in sorted((float(one.labels["le"]), one.value) for one in buckets)]
        assert counts == sorted(counts)
        (total,) = figures.samples(f"{name}_count", model_name="demo")
        assert counts[-1] == total.value


def test_refusals_are_counted_by_tag(server: Server) -> None:
    before = server.metric("tidewheel_requests_rejected_total", tag="TW-INPUT")
    assert server.post("demo/generate", {"text_input": ""}).status_code == 400
    wait_for(
        lambda: server.metric("tidewheel_requests_rejected_total", tag="TW-INPUT") == before + 1, 60, "rejection"
    )


def test_exposition_format_is_valid(server: Server) -> None:
    """Every sample belongs to a family that was announced, and no family is announced twice."""
    text = requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60).text
    announced = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    kinds = dict(announced)
    assert len(announced) == len(kinds)
    assert [kinds.get(name) for name in HISTOGRAMS] == ["histogram"] * len(HISTOGRAMS)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name = line.partition("{")[0].split()[0]
            if name not in kinds:
                assert kinds[re.sub("_(bucket|sum|count)$", "", name)] in ("histogram", "summary"), line
