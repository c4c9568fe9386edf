"""The recorded step responses are those of the code as it is."""

from __future__ import annotations

import json

import pytest

from common.study import RESULTS
from engine import step_response
from modelled.controller_models import run_governor


@pytest.mark.parametrize("name", ["tpot", "governor", "window"])
def test_the_record_shows_what_the_code_does(name: str) -> None:
    response = step_response.responses()[name]
    trace = response.run(response.scenario)
    found = step_response.phases(trace, response.knob, response.changes)
    recorded = json.loads((RESULTS / f"step_response_{name}.json").read_text())["phases"]
    assert [phase.begin_s for phase in found] == [phase["begin_s"] for phase in recorded]
    values = [phase["settled_value"] for phase in recorded]
    assert [phase.settled_value for phase in found] == pytest.approx(values, rel=0.02)


def test_the_governor_spares_preemptions() -> None:
    scenario = step_response.responses()["governor"].scenario
    governed, free = (run_governor(scenario, governed)["preemptions"][-1] for governed in (True, False))
    assert governed < 0.1 * free


def test_a_phase_is_settled_from_where_it_stays_near_its_end() -> None:
    trace = {"seconds": [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 11.0, 20.0], "knob": [8, 4, 3, 2, 2, 2, 6, 6]}
    first, second = step_response.phases(trace, "knob", [0.0, 10.5])
    assert (first.settled_value, first.settling_s) == (2.0, 2.0)
    assert (second.settled_value, second.settling_s) == (6.0, 0.0)
