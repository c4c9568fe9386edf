"""Spans as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

from support.frontend.ended_requests import MS, PARENT, TRACE, ended, refused
from support.triton.otlp_collector import attributes, collecting
from tidewheel.errors import ConfigError
from tidewheel.frontend.ended_requests import wall_offset_ns


@pytest.fixture
def make_spans() -> Callable[..., Any]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra tracing")
    from tidewheel.frontend.ended_requests import RequestSpans

    return RequestSpans


def test_a_request_is_a_span_with_its_stages(make_spans: Callable[..., Any]) -> None:
    with collecting() as collector:
        spans = make_spans(collector.url, "demo")
        spans.write([ended()])
        spans.close()
        (root,) = collector.wait_roots(1)
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "tidewheel"
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.kind == 2, "a server's"
    assert attributes(root) == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tidewheel",
        "gen_ai.request.model": "demo",
        "gen_ai.request.choice.count": 1, "gen_ai.response.id": "r", "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.usage.output_tokens": 9,
        "tidewheel.class": "HIGH", "tidewheel.tenant": "acme", "tidewheel.responses": 3, "tidewheel.session": True,
        "tidewheel.client_cancelled": False,
    }  # fmt: skip
    stages = collector.stages(root)
    wall_ns = wall_offset_ns()
    begin_ms = [round((span.start_time_unix_nano - wall_ns) / MS) for span in (root, *stages.values())]
    took_ms = {name: (span.end_time_unix_nano - span.start_time_unix_nano) // MS for name, span in stages.items()}
    assert took_ms == {"queue": 10, "prefill": 20, "decode": 30, "send": 40}
    assert begin_ms == pytest.approx([1000, 1000, 1010, 1030, 1060], abs=500)
    assert all(span.trace_id == root.trace_id for span in stages.values())


def test_an_error_has_its_tag_and_only_the_stages_that_were(make_spans: Callable[..., Any]) -> None:
    with collecting() as collector:
        spans = make_spans(collector.url, "demo")
        spans.write([refused("r", 1000 * MS, 1001 * MS, traceparent="")])
        spans.close()
        (root,) = collector.wait_roots(1)
    assert (root.status.code, root.status.message, root.parent_span_id) == (2, "TW-KV-FULL", b"")
    assert attributes(root)["error.type"] == "TW-KV-FULL"
    assert collector.stages(root) == {}


@pytest.mark.parametrize("wrong", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_a_malformed_parent_begins_a_trace(make_spans: Callable[..., Any], wrong: str) -> None:
    with collecting() as collector:
        spans = make_spans(collector.url, "demo")
        spans.write([ended(traceparent=wrong)])
        spans.close()
        (root,) = collector.wait_roots(1)
    assert root.parent_span_id == b"" and root.trace_id.hex() not in (TRACE, "0" * 32)


def test_a_parent_that_is_not_sampled_costs_nothing(make_spans: Callable[..., Any]) -> None:
    with collecting() as collector:
        spans = make_spans(collector.url, "demo")
        spans.write([ended(traceparent=f"00-{TRACE}-{PARENT}-00"), ended("other", traceparent="")])
        spans.close()
        assert [attributes(root)["gen_ai.response.id"] for root in collector.wait_roots(1)] == ["other"]


def test_without_the_packages_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tidewheel.frontend.ended_requests import RequestSpans

    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint is set.*pip install 'tidewheel\[tracing\]'$"):
        RequestSpans("http://127.0.0.1:4318/v1/traces", "demo")
