"""Figures of the gateway and of the servers behind it."""

from __future__ import annotations

from pathlib import Path

from tidewheel.gateway.counters import Counts, GatewayWorker, merge, render

TEXT = """\
# HELP f a family
# TYPE f counter
f{model="a"} 1
f_bare 2
# HELP g another
# TYPE g gauge
g 3e+06
"""


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


def test_one_server_is_passed_on() -> None:
    assert merge({"h:1": TEXT}) == TEXT


def test_samples_of_several_servers_are_labelled() -> None:
    assert merge({"h:1": TEXT, "h:2": 'f{model="a"} 4\n', "h:3": ""}).splitlines() == [
        "# HELP f a family",
        "# TYPE f counter",
        'f{model="a",upstream="h:1"} 1',
        'f_bare{upstream="h:1"} 2',
        "# HELP g another",
        "# TYPE g gauge",
        'g{upstream="h:1"} 3e+06',
        'f{model="a",upstream="h:2"} 4',
    ]
