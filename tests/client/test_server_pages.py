"""Metrics and health of a server, as a client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import tidewheel_client as tc
from tidewheel.health_endpoint import READY, HealthEndpoint, Readiness
from tidewheel_client import AsyncClient, Client, Figures, Health
from tidewheel_client.server_pages import verifies

TEXT = """\
# HELP vllm:num_requests_running Requests in the running set
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="a",version="1"} 2
vllm:num_requests_running{model="b",version="1"} 3
# TYPE tidewheel_requests_rejected counter
tidewheel_requests_rejected_total{model="a",tag="TW-BUSY"} 7
"""


class Page(NamedTuple):
    endpoint: HealthEndpoint

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.endpoint.port}/{path}"


@pytest.fixture
def page() -> Iterator[Page]:
    endpoint = HealthEndpoint("127.0.0.1", 0, lambda: READY)
    yield Page(endpoint)
    endpoint.close()


@pytest.mark.parametrize(("url", "wanted"), [("http://a/", False), ("https://a/", True), ("HTTPS://a/", True)])
def test_certificates_are_checked_wherever_there_are_any(url: str, wanted: bool) -> None:
    assert verifies(url) is wanted


def test_names_are_those_of_the_page() -> None:
    text = "# TYPE nv_inference_count counter\nnv_inference_count 3\n"
    assert Figures.parse(text).value("nv_inference_count") == 3


def test_figures() -> None:
    figures = Figures.parse(TEXT)
    assert figures.value("vllm:num_requests_running") == 5
    assert figures.value("vllm:num_requests_running", model="b") == 3
    assert figures.value("vllm:num_requests_running", model="c") == 0
    assert figures.value("tidewheel_requests_rejected_total", tag="TW-BUSY") == 7
    assert [sample.labels["model"] for sample in figures.samples("vllm:num_requests_running")] == ["a", "b"]
    with pytest.raises(KeyError, match="shows no metric vllm:typo"):
        figures.value("vllm:typo")


def test_metrics_and_health_of_a_server(page: Page) -> None:
    urls = {"metrics_url": page.url("metrics"), "health_url": page.url("ready")}
    with Client(**urls) as client:
        assert client.metrics().value("tidewheel_ready") == 1
        assert client.health() == Health(True, "ready", "")
        page.endpoint.report = lambda: Readiness("hung", "no step for 9 s")
        assert client.health() == Health(False, "hung", "no step for 9 s")

    async def main() -> None:
        async with AsyncClient(**urls) as client:
            assert (await client.metrics()).value("tidewheel_ready") == 0
            assert (await client.health()).state == "hung"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("unix:/run/triton.sock", tc.InvalidRequest, "give health_url"),
        ("dns:///host:8001", tc.InvalidRequest, "give health_url"),
        ("127.0.0.1:1", tc.ServerUnavailable, r"http://127\.0\.0\.1:8003/ready"),
        ("http://[::1]:8000", tc.ServerUnavailable, r"http://\[::1\]:8003/ready"),
    ],
)
def test_the_address_that_follows(url: str, error: type[tc.RequestError], words: str) -> None:
    with Client(url) as client, pytest.raises(error, match=words):
        client.health()


@pytest.mark.parametrize("path", ["metrics", "elsewhere"])
def test_a_page_that_is_something_else(page: Page, path: str) -> None:
    with Client(health_url=page.url(path)) as client, pytest.raises(tc.ServerUnavailable):
        client.health()
