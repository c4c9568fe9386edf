"""Figures of a running server under load.

They are what its clients count. Prometheus, with the files of `deploy`, answers every query of the dashboard and of
the rules, and fires the alerts of planted failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.dashboard_panels import Span, draw, read_lines, read_panels
from support.deploy.planted_load import KEY, SETTINGS, Load, Tally, serving_with_gateway
from support.deploy.prometheus_server import (
    HAS_PROMETHEUS,
    MISSING,
    Prometheus,
    alerts,
    panel_queries,
    prometheus,
    rules,
    without_limit,
)
from support.faults.planted import Fault
from support.triton.serving import Server, wait_for
from tidewheel.metrics import GATEWAY_ERRORS, TABLE
from tidewheel_client import Busy, Client, EngineDead
from tidewheel_client.server_pages import read_figures

pytestmark = pytest.mark.e2e

needs_prometheus = pytest.mark.skipif(not HAS_PROMETHEUS, reason=MISSING)

DEMO = ("model", "demo")
AGREEMENT = 0.01
SETTLE_S = 90.0
LIMIT_S = 90.0
# Families of which a client knows nothing: how the engine came to its answers.
OF_THE_ENGINE = {
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:iteration_tokens_total",
    "tidewheel_swap_preemptions_total", "tidewheel_steps_total", "tidewheel_step_seconds_total",
    "tidewheel_scheduled_tokens_total", "tidewheel_engine_restarts_total", "tidewheel_requests_aged_total",
    "tidewheel_requests_downgraded_total", "tidewheel_predictions_total", "tidewheel_kv_blocks_swapped_total",
    "tidewheel_kv_queried_tokens_total", "tidewheel_kv_hit_tokens_total",
    "tidewheel_requests_evicted_total", "tidewheel_requests_shed_total", "tidewheel_requests_rate_limited_total",
    "tidewheel_requests_expired_total", "tidewheel_requests_hopeless_total", "tidewheel_tenant_queue_seconds_total",
    "tidewheel_objectives_total", "tidewheel_objectives_met_total", "tidewheel_tenant_objectives_total",
    "tidewheel_tenant_objectives_met_total", "tidewheel_weight_steps_total", "tidewheel_turn_wait_seconds_total",
    "tidewheel_lora_loads_total", "tidewheel_lora_evictions_total",
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
}  # fmt: skip


@pytest.fixture(scope="module")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request_log: Path) -> Iterator[Server]:
    settings = {**SETTINGS, "request_log": str(request_log)}
    with serving_with_gateway(tmp_path_factory.mktemp("figures"), settings) as running:
        yield running


@pytest.fixture(scope="module")
def load(server: Server) -> Load:
    return Load(server)


def counts(tally: Tally) -> dict[str, float]:
    """Return what families show after whole answers and refusals, by the clients' count."""
    num_refused, num_answered = tally.errors.total(), tally.finished.total()
    return {
        "tidewheel_requests_received_total": tally.num_sent,
        "vllm:request_success_total": num_answered,
        "tidewheel_requests_rejected_total": num_refused,
        "tidewheel_requests_failed_total": 0,
        "tidewheel_requests_answered_total": num_answered,
        "vllm:prompt_tokens_total": tally.num_prompt_tokens,
        "vllm:generation_tokens_total": tally.num_output_tokens,
        "vllm:prefix_cache_queries_total": tally.num_prompt_tokens,
        "vllm:request_prompt_tokens_sum": tally.num_prompt_tokens,
        "vllm:request_generation_tokens_sum": tally.num_output_tokens,
        "vllm:request_params_n_sum": num_answered,
        "vllm:time_to_first_token_seconds_count": tally.num_first_tokens,
        "vllm:inter_token_latency_seconds_count": tally.num_output_tokens - tally.num_first_tokens,
        "vllm:time_per_output_token_seconds_count": tally.num_output_tokens - tally.num_first_tokens,
        "tidewheel_refusal_seconds_count": num_refused - tally.num_displaced,
        "tidewheel_requests_started_total": num_answered,
        "tidewheel_tenant_requests_total": tally.num_sent,
        "tidewheel_tenant_requests_rejected_total": num_refused,
        "tidewheel_tenant_requests_started_total": num_answered,
        "tidewheel_tenant_prompt_tokens_total": tally.num_prompt_tokens,
        "tidewheel_tenant_generation_tokens_total": tally.num_output_tokens,
    } | {
        f"vllm:{name}_count": num_answered
        for name in (
            "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
            "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
            "request_generation_tokens", "request_params_n",
        )
    }  # fmt: skip


def wait_agreement(server: Server, expected: dict[tuple[str, tuple[str, str]], float]) -> None:
    """Wait until the sums of samples with a name and a label are what is expected, within 1 %."""

    def disagreeing() -> list[str]:
        samples = server.metrics()
        found = []
        for (name, (label, value)), count in expected.items():
            shown = sum(sample.value for sample in samples.samples(name, **{label: value}))
            if abs(shown - count) > AGREEMENT * count:
                found.append(f"{name} of {value} is {shown:g}, and clients counted {count:g}")
        return found

    with contextlib.suppress(pytest.fail.Exception):  # the assertion says more
        wait_for(lambda: not disagreeing(), SETTLE_S, "agreement")
    assert disagreeing() == []


def test_every_family_is_compared() -> None:
    ours = {one.name for one in TABLE if one.kind != "gauge" and one.owner in ("engine", "tenant", "requests")}
    compared = {re.sub("_(sum|count)$", "", name) for name in counts(Tally())} | {"tidewheel_requests_in_time_total"}
    assert compared | OF_THE_ENGINE == ours
    assert not compared & OF_THE_ENGINE


def test_families_agree_with_the_count_of_clients(server: Server, load: Load) -> None:
    """A round has few enough tokens for one flush: of more, histograms of single tokens hold a sample."""
    tally = load.tally
    for _ in range(3):
        load.overload()
        wait_agreement(server, {("vllm:generation_tokens_total", DEMO): tally.num_output_tokens})
    assert tally.finished.keys() == {"length"} and tally.errors.keys() == {"TW-BUSY"}
    wait_agreement(server, {(name, DEMO): count for name, count in counts(tally).items()})
    by_class = {("tidewheel_requests_answered_total", ("class", name)): n for name, n in tally.answered.items()}
    wait_agreement(server, by_class)
    assert server.metric("tidewheel_requests_in_time_total") <= tally.answered.total()


def test_reasons_and_tags_agree_with_the_count_of_clients(server: Server, load: Load) -> None:
    for _ in range(3):
        load.mishaps()
    tally = load.tally
    assert {"cancelled", "length"} < tally.finished.keys()
    assert {"TW-BUSY", "TW-DEADLINE", "TW-INPUT", "TW-NUMERIC", "TW-KEY"} == tally.errors.keys()
    wrong_keys, failures = tally.errors["TW-KEY"], tally.errors["TW-NUMERIC"]
    refusals = {tag: count for tag, count in tally.errors.items() if tag not in ("TW-KEY", "TW-NUMERIC")}
    wait_agreement(
        server,
        {("vllm:request_success_total", ("finished_reason", reason)): n for reason, n in tally.finished.items()}
        | {("tidewheel_requests_rejected_total", ("tag", tag)): count for tag, count in refusals.items()}
        | {("tidewheel_requests_failed_total", ("tag", "TW-NUMERIC")): failures}
        | {("tidewheel_requests_received_total", DEMO): tally.num_sent},
    )

    def num_wrong_keys() -> float:
        page = read_figures(f"{server.openai}/metrics", KEY)
        return sum(sample.value for sample in page.samples(GATEWAY_ERRORS.name, tag="TW-KEY"))

    wait_for(lambda: num_wrong_keys() == wrong_keys, SETTLE_S, "counts of both workers")


@pytest.fixture(scope="module")
def scraped(server: Server, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that scrapes the server, under load until the end."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, server, gateway_key=KEY, window="20s") as running, load.going_on():
        wait_for(lambda: running.targets() == {"tritonserver": "up", "gateway": "up"}, LIMIT_S, "two scraped targets")
        yield running


@needs_prometheus
def test_every_query_and_rule_returns_data(scraped: Prometheus) -> None:
    queries = {*panel_queries(), *(rule["record"] for rule in rules() if "record" in rule)}
    queries |= {without_limit(alert["expr"]) for alert in alerts()}
    wait_for(lambda: not [query for query in queries if not scraped.query(query)], LIMIT_S, "data for every query")


@needs_prometheus
def test_panels_are_drawn(scraped: Prometheus) -> None:
    span = Span(time.time() - 10.0, time.time())
    (panel,) = read_panels(["Waiting by class"])
    lines = read_lines(scraped.url, panel, "demo", span)
    assert {line.legend for line in lines} == {"critical", "high", "normal", "low"}
    assert all(span.start - 1 < at < span.end + 1 and value >= 0 for line in lines for at, value in line.points)
    assert draw(scraped.url, read_panels(), ".*", span).startswith(b"\x89PNG")


@needs_prometheus
@pytest.mark.parametrize("tag", ["TW-BUSY", "TW-KV-FULL"])
def test_an_overload_fires_its_alert(scraped: Prometheus, tag: str) -> None:
    wait_for(lambda: ("TidewheelOverload", tag) in firing(scraped), LIMIT_S, "the alert of an overload")
    assert not {"TidewheelServerDown", "TidewheelGatewayDown"} & {name for name, _ in firing(scraped)}


@needs_prometheus
def test_other_planted_failures_fire_theirs(scraped: Prometheus) -> None:
    expected = {
        ("TidewheelFailures", "TW-NUMERIC"),
        ("TidewheelWrongKeys", "TW-KEY"),
        ("TidewheelDeadlines", "TW-DEADLINE"),
    }
    wait_for(lambda: expected <= firing(scraped), LIMIT_S, f"{expected}")


def end_engine(server: Server) -> None:
    """Let the engine die in a step with a request of ours."""

    def dies() -> bool:
        try:
            client.generate(input_ids=Fault.ABORTS.prompt(), max_tokens=40, priority=1)
        except EngineDead:
            return True
        except Busy:  # beside other load
            return False
        pytest.fail("the engine lives")

    with Client(server.grpc, timeout_s=LIMIT_S) as client:
        wait_for(dies, LIMIT_S, "a place for the request")


@needs_prometheus
def test_a_killed_engine_fires_its_alert(server: Server, scraped: Prometheus) -> None:
    end_engine(server)
    restarted = ("TidewheelEngineRestarted", "TW-ENGINE-DEAD")
    wait_for(lambda: restarted in firing(scraped), LIMIT_S, "the alert of an engine that was started again")
    failed = 'model_tag:tidewheel_failed:rate1m{tag="TW-ENGINE-DEAD"} > 0'
    wait_for(lambda: scraped.query(failed), LIMIT_S, "failures by tag")


def test_a_failure_has_one_name_everywhere(server: Server, load: Load, request_log: Path) -> None:
    """In exceptions of the client, the request log, the gateway's log and `tidewheel top`; above, in alerts."""
    for plant in (load.overload, load.fill_cache, load.mishaps):
        plant()
    end_engine(server)
    of_requests = {"TW-BUSY", "TW-KV-FULL", "TW-DEADLINE", "TW-NUMERIC", "TW-ENGINE-DEAD"}
    assert {*load.tally.errors, EngineDead.tag} >= {*of_requests, "TW-KEY"}
    wait_for(lambda: tags_of(request_log) >= of_requests, SETTLE_S, "a line for each tag")
    wait_for(lambda: "[TW-KEY]" in server.log.read_text(), SETTLE_S, "the gateway's line")
    wait_for(lambda: tags_at_top(server) >= {*of_requests, "TW-KEY"}, LIMIT_S, "all tags at top")


def tags_of(request_log: Path) -> set[str | None]:
    return {json.loads(line)["tag"] for line in request_log.read_text().splitlines()}


def tags_at_top(server: Server) -> set[str]:
    addresses = {"metrics": server.metrics_port, "health": server.health_port, "gateway": server.openai_port}
    pages = {"metrics": "metrics", "health": "ready", "gateway": "metrics"}
    options = [f"--{name}-url=http://127.0.0.1:{port}/{pages[name]}" for name, port in addresses.items()]
    command = [sys.executable, "-m", "tidewheel.cli.main", "top", "--json", "--interval-s", "0.2", *options]
    environment = {**os.environ, "TIDEWHEEL_API_KEY": KEY}
    view = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)
    return {line["tag"] for line in view["errors"] if line["refused"] or line["failed"] or line["gateway"]}


def firing(running: Prometheus) -> set[tuple[str, str]]:
    return {(labels["alertname"], labels.get("tag", "")) for labels in running.firing()}
