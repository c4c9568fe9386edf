"""Which runs there are, in which order, on which requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from support.bench.runs import stage
from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.outcome import Conversation
from tidewheel.bench.run_plan import PlannedRun, in_turns
from tidewheel.bench.workloads import FIRST_ID, parse_workload

TARGETS = ("continuous", "static", "baseline_dynamic")
LOAD = LoadPattern("poisson", 5.0)


def test_all_targets_take_their_turn_before_any_comes_again() -> None:
    runs = list(stage(TARGETS, repeats=3).runs())
    assert len(runs) == 3 * 2 * 3
    for start in range(0, len(runs), 3):
        turn = runs[start : start + 3]
        assert {run.target.name for run in turn} == set(TARGETS)
        assert len({(run.load, run.repeat, run.seed) for run in turn}) == 1


def test_no_target_is_always_the_first() -> None:
    runs = list(stage(TARGETS, repeats=3).runs())
    first = Counter(run.target.name for run in runs[::3])
    assert set(first.values()) == {2}


def test_targets_get_the_same_requests_and_repeats_get_others() -> None:
    one = stage(TARGETS, loads=[LoadPattern("poisson", 5.0)])
    loads = {(run.target.name, run.repeat): list(one.conversations(run)) for run in one.runs()}
    assert loads["continuous", 0] == loads["static", 0] == loads["baseline_dynamic", 0]
    assert loads["continuous", 0] != loads["continuous", 1]
    times = [turns[0].at for turns in loads["continuous", 0]]
    assert times == sorted(times)
    assert len(times) > 0
    assert times[-1] < 10.0


def test_a_number_of_requests_cuts_an_open_loop() -> None:
    one = stage(loads=[LoadPattern("poisson", 50.0)], max_requests=12)
    assert len(list(one.conversations(next(one.runs())))) == 12


def test_everything_at_once() -> None:
    one = stage(loads=[LoadPattern("all")], max_requests=9)
    assert [turns[0].at for turns in one.conversations(next(one.runs()))] == [0.0] * 9


def test_a_trace_is_played_at_its_speed_within_the_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n" + "".join(f"{at},4,5\n" for at in (0, 8, 16, 40)))
    workload = parse_workload(f"trace:{path}", vocab=100, max_tokens=50)
    one = stage(loads=[LoadPattern("trace", 2.0)], workload=workload)
    assert [turns[0].at for turns in one.conversations(next(one.runs()))] == [0.0, 4.0, 8.0]


def test_stages_in_turns_are_repeated_together() -> None:
    one, other = stage(TARGETS, repeats=2, loads=[LOAD]), stage(TARGETS, repeats=3, loads=[LOAD])
    runs = in_turns([one, other])
    of_repeat = [[(index, run.target.name) for index, run in runs if run.repeat == repeat] for repeat in range(3)]
    assert [entry for entries in of_repeat for entry in entries] == [(i, run.target.name) for i, run in runs]
    assert [[index for index, _ in entries] for entries in of_repeat] == [[0] * 3 + [1] * 3] * 2 + [[1] * 3]
    assert [run for index, run in runs if index == 1] == list(other.runs())


def test_a_load_is_called_by_its_name_where_it_has_one() -> None:
    assert stage(TARGETS, loads=[LOAD]).label(LOAD) == "5/s"
    assert replace(stage(TARGETS, loads=[LOAD]), load_names=("the knee",)).label(LOAD) == "the knee"


def test_points_of_a_search_have_the_same_requests_at_scaled_times_and_prompts_of_their_own() -> None:
    one = stage(TARGETS, loads=[], seconds=5.0, longest_s=20.0)

    def requests(rate: float, shift: int) -> list[Conversation]:
        run = PlannedRun(one.targets[0], LoadPattern("poisson", rate), 0, 7, longest_s=40 / rate, ids_shift=shift)
        return list(one.conversations(run))

    slow, fast = requests(2.0, 0), requests(8.0, 97)
    assert len(slow) == len(fast) > 20
    for (before,), (after,) in zip(slow, fast, strict=True):
        assert before.at == pytest.approx(4.0 * after.at)
        assert before.num_output_tokens == after.num_output_tokens
        assert len(before.input_ids) == len(after.input_ids)
        assert before.input_ids[0] != after.input_ids[0]
        assert all(FIRST_ID <= token_id < one.workload.vocab for token_id in after.input_ids)
