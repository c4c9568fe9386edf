"""Figures of the gateway and of the servers behind it."""

from __future__ import annotations

from pathlib import Path

from tidewheel.gateway.counters import Counters, GatewayWorker, merge
from tidewheel_client.errors import KvCacheFull, ServerUnavailable, WrongKey

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
    requests = {"/v1/completions 200": 1}
    counters = Counters(requests=requests, num_open=2, num_hang_ups=3, open_upstream={"u": 1, "idle": 0})
    for error in (KvCacheFull("full"), WrongKey("wrong"), ServerUnavailable("gone"), KvCacheFull("full")):
        counters.count_error(error)
    first.publish(counters)
    assert first.is_listening()
    total = Counters.sum_of([counters, *second.others()])
    assert (total.num_open, total.num_hang_ups, total.open_upstream) == (4, 6, {"u": 2, "idle": 0})
    assert total.errors == {"TW-KV-FULL": 4, "TW-KEY": 2, "ServerUnavailable": 2}
    assert total.requests == {"/v1/completions 200": 2}
    text = total.render({"u": True})
    for line in (
        'tidewheel_gateway_requests_total{path="/v1/completions",status="200"} 2.0',
        'tidewheel_gateway_errors_total{tag="TW-KV-FULL"} 4.0',
        "tidewheel_gateway_open_requests 4.0",
        'tidewheel_gateway_upstream_ready{upstream="u"} 1.0',
        'tidewheel_gateway_upstream_open_requests{upstream="u"} 2.0',
        'tidewheel_gateway_upstream_open_requests{upstream="idle"} 0.0',
    ):
        assert f"{line}\n" in text
    again = GatewayWorker(tmp_path, 0, 2).before()
    assert (again.num_open, again.num_hang_ups, again.requests) == (0, 3, counters.requests)
    (tmp_path / "0.json").write_text("{")
    assert second.others() == [Counters()]
    GatewayWorker(tmp_path / "gone", 0, 2).publish(counters)


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
