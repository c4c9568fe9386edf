from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidewheel_kernels.native.library import libgomp
from tidewheel_kernels.native.own_processors import OwnProcessors

ALL = os.sched_getaffinity(0)


def threads() -> set[int]:
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


def bound_and_let_go() -> list[list[set[int]]]:
    """Return the processors of a new team's threads in a step, between steps, and at the end."""
    before, own, found = threads(), OwnProcessors(len(ALL)), []
    own.begin_step(True)
    team = [0, *(threads() - before)]
    found.append([os.sched_getaffinity(thread) for thread in team])
    own.end_step()
    found.append([os.sched_getaffinity(0)])
    own.begin_step(False)
    found.append([os.sched_getaffinity(thread) for thread in team])
    return found


@pytest.mark.skipif(libgomp() is None or len(ALL) < 2, reason="needs GNU OpenMP and two processors")
def test_threads_have_a_processor_each_until_they_are_let_go() -> None:
    with ThreadPoolExecutor(1) as pool:
        in_step, between, at_end = pool.submit(bound_and_let_go).result()
    assert sorted(in_step, key=sorted) == [{number} for number in sorted(ALL)]
    assert all(allowed == ALL for allowed in (*between, *at_end))


def test_fewer_threads_than_processors_are_not_bound() -> None:
    own = OwnProcessors(len(ALL) + 1)
    own.begin_step(True)
    assert os.sched_getaffinity(0) == ALL
