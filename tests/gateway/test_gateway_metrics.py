"""Figures of the gateway and its workers."""

from __future__ import annotations

from pathlib import Path

from tidewheel.gateway.counters import Counts, GatewayWorker, render


def test_figures_of_workers(tmp_path: Path) -> None:
    first, second = (GatewayWorker(tmp_path, index, 2) for index in range(2))
    assert not first.is_listening()
    counts = Counts(
        {
            "tidewheel_gateway_requests_total /v1/completions 200": 1,
            "tidewheel_gateway_errors_total TW-KV-FULL": 2,
            "tidewheel_gateway_open_requests": 2,
            "tidewheel_gateway_upstream_open_requests u": 1,
            "tidewheel_gateway_upstream_open_requests idle": 0,
        }
    )
    first.publish(counts)
    assert first.is_listening()
    total = counts.copy()
    for others in second.others():
        total.update(others)
    text = render(total)
    for line in (
        'tidewheel_gateway_requests_total{path="/v1/completions",status="200"} 2.0',
        'tidewheel_gateway_errors_total{tag="TW-KV-FULL"} 4.0',
        'tidewheel_gateway_errors_total{tag="TW-KEY"} 0.0',
        "tidewheel_gateway_open_requests 4.0",
        "tidewheel_gateway_hang_ups_total 0.0",
        'tidewheel_gateway_upstream_open_requests{upstream="u"} 2.0',
        'tidewheel_gateway_upstream_open_requests{upstream="idle"} 0.0',
    ):
        assert f"{line}\n" in text
    again = GatewayWorker(tmp_path, 0, 2).before()
    assert list(again) == list(counts)[:2], "totals alone"
    (tmp_path / "0.json").write_text("{")
    assert second.others() == [Counts()]
    GatewayWorker(tmp_path / "gone", 0, 2).publish(counts)
