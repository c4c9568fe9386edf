"""Figures of the gateway and of the servers behind it."""

from __future__ import annotations

from tidewheel.gateway.counters import merge

TEXT = """\
# HELP f a family
# TYPE f counter
f{model="a"} 1
f_bare 2
# HELP g another
# TYPE g gauge
g 3e+06
"""


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
