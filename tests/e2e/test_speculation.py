"""Speculative decoding on a real server: answers are those without it, and drafts are counted everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import openai
import pytest

from support.triton.serving import (
    WEIGHTS,
    Server,
    grpc_inputs,
    grpc_stream,
    start_server,
    stop_server,
    texts,
    token_ids,
    wait_for,
    wait_ready,
)
from tidewheel_client import Client, PerfMetrics

pytestmark = pytest.mark.e2e

CONFIG = 'backend: "tidewheel"\nmodel_transaction_policy { decoupled: true }\n'
METHODS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}},
    "draft": {"speculation": "draft_model", "draft_model": str(WEIGHTS), "num_speculative_tokens": 4},
}
SPECULATIVE = ("lookup", "draft")
TEXT = "A tuple is a list. A list is a tuple of rows. A tuple is a list. A list is"
COUNT = 96
LIMIT_S = 120.0
SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalised": {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "of a pattern": {"temperature": 0.7, "seed": 5, "guided_regex": "( (list|tuple|of|rows)){24}"},
}
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("speculation")
    for name, settings in METHODS.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(CONFIG)
        common = {"model": str(WEIGHTS), "dtype": "float32", "kv_cache_memory_mb": 32, "num_threads": 1}
        (folder / "models" / name / "1" / "model.json").write_text(json.dumps({**common, **settings}))
    log = folder / "serve.log"
    running = wait_ready(start_server("--model-repository", str(folder / "models"), "-v", log=log, with_gateway=True))
    yield running
    assert stop_server(running) == 0, log.read_text()


@pytest.fixture(scope="module")
def drafted(server: Server) -> Mapping[str, PerfMetrics]:
    """Return the figures of a request with accepted drafts, by model: their price and worth are learned first."""

    def with_drafts(model: str) -> PerfMetrics | None:
        with Client(server.grpc, model) as client:
            options = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "return_perf_metrics": True}
            perf = client.generate(TEXT, **options).perf
        assert perf is not None
        return perf if perf.num_accepted_draft_tokens else None

    return {
        model: wait_for(lambda m=model: with_drafts(m), LIMIT_S, f"accepted drafts of {model}")
        for model in SPECULATIVE
    }


class Streamed(NamedTuple):
    token_ids: list[int]
    text: str
    logprobs: list[float]  # of each token, and of the best ones


def ask(server: Server, model: str, **parameters: Any) -> Streamed:
    sampling = json.dumps({"max_tokens": COUNT, "ignore_eos": True, "logprobs": 2, **parameters})
    inputs = grpc_inputs(TEXT, sampling_parameters=sampling, return_token_ids=True, return_logprobs=True)
    results = grpc_stream(server, inputs, model=model)
    logprobs = [entry for result in results for entry in json.loads(result.as_numpy("logprobs")[0])]
    found = [one["logprob"] for entry in logprobs for one in entry.values() if one["logprob"] is not None]
    return Streamed(token_ids(results), "".join(texts(results)), found)


@pytest.mark.parametrize("model", SPECULATIVE)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_streams_are_those_without_drafts(
    server: Server, drafted: Mapping[str, PerfMetrics], model: str, sampling: str
) -> None:
    assert drafted[model].num_draft_tokens
    with_drafts, without = (ask(server, name, **SAMPLINGS[sampling]) for name in (model, "plain"))
    assert with_drafts[:2] == without[:2] and without.token_ids
    assert with_drafts.logprobs == pytest.approx(without.logprobs, abs=1e-3)


@pytest.mark.parametrize("model", SPECULATIVE)
@pytest.mark.parametrize("streams", [False, True])
def test_plain_answers_are_those_without_drafts(
    server: Server, drafted: Mapping[str, PerfMetrics], model: str, streams: bool
) -> None:
    """Requests of one sequence without log-probabilities take a way of their own through the server."""
    assert drafted[model].num_accepted_draft_tokens

    def answer(name: str) -> str:
        options: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
        with Client(server.grpc, name) as client:
            if streams:
                return "".join(chunk.text for chunk in client.stream(TEXT, **options))
            return client.generate(TEXT, **options).text

    assert answer(model) == answer("plain") != ""


@pytest.mark.parametrize("model", SPECULATIVE)
def test_streams_of_the_gateway_are_those_without_drafts(server: Server, model: str) -> None:
    def stream(name: str) -> tuple[list[str], int]:
        parts = list(
            client.completions.create(
                model=name, prompt=TEXT, max_tokens=COUNT, temperature=0.6, seed=9, n=2, stream=True,
                stop=["tuple of tuple"], stream_options={"include_usage": True},
            )
        )  # fmt: skip
        choices = [choice for part in parts for choice in part.choices]
        assert parts[-1].usage is not None
        of_choice = ["".join(choice.text for choice in choices if choice.index == index) for index in (0, 1)]
        return of_choice, parts[-1].usage.completion_tokens

    with openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as client:
        assert stream(model) == stream("plain")


@pytest.mark.parametrize("model", SPECULATIVE)
@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_among_drafts_ends_the_answer_where_it_does_without(
    server: Server, drafted: Mapping[str, PerfMetrics], model: str, streams: bool
) -> None:
    assert drafted[model].num_accepted_draft_tokens

    def answer(name: str, **options: Any) -> tuple[str, str | None, int]:
        asked = {"model": name, "prompt": TEXT, "max_tokens": COUNT, "temperature": 0.0, **options}
        if not streams:
            whole = client.completions.create(**asked)
            assert whole.usage is not None
            return whole.choices[0].text, whole.choices[0].finish_reason, whole.usage.completion_tokens
        parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        choices = [choice for part in parts for choice in part.choices]
        assert parts[-1].usage is not None
        text = "".join(choice.text for choice in choices)
        return text, choices[-1].finish_reason, parts[-1].usage.completion_tokens

    with openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as client:
        text, _, count = answer("plain")
        for place in (20, 61, 102):
            stop = text[place : place + 9]
            found = answer(model, stop=[stop])
            assert found == answer("plain", stop=[stop])
            assert found[:2] == (text[: text.index(stop)], "stop") and found[2] < count


@pytest.mark.parametrize("model", SPECULATIVE)
def test_drafts_are_counted(server: Server, drafted: Mapping[str, PerfMetrics], model: str) -> None:
    perf = drafted[model]
    assert 0 < perf.num_accepted_draft_tokens <= perf.num_draft_tokens
    assert perf.num_accepted_draft_tokens < COUNT
    wait_for(lambda: server.metric(DRAFTED, model=model) >= perf.num_draft_tokens, LIMIT_S, "the figures")
    assert 0 < server.metric(ACCEPTED, model=model) <= server.metric(DRAFTED, model=model)
    assert server.metric(DRAFTED, model="plain") == 0.0


def test_drafts_are_shown_at_top(server: Server, drafted: Mapping[str, PerfMetrics]) -> None:
    assert drafted
    pages = (f"--metrics-url=http://127.0.0.1:{server.metrics_port}/metrics", "--model=lookup")
    pages += (f"--health-url=http://127.0.0.1:{server.health_port}/ready", "--interval-s=5")
    command = [sys.executable, "-m", "tidewheel.cli.main", "top", "--json", *pages]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    while process.poll() is None:
        ask(server, "lookup", temperature=0.0)
    assert process.stdout is not None
    steps = json.loads(process.stdout.read())["steps"]
    assert 0 <= steps["accepted_drafts"] <= 1 and steps["accepted_per_step"] >= 0


def test_arguments_without_effect_are_named(server: Server) -> None:
    assert "no effect here: speculative_config.prompt_lookup_max" in server.log.read_text()
