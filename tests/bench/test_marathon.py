"""Judgement, plan and page of `make marathon`, on invented runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from support.marathon.disturbances import HOLD_S, KINDS, order
from support.marathon.judgement import LATENCIES, Verdict, judge, p99
from support.marathon.ledger import RECOVERY_LIMIT_S, Call, Fault, Rest, Run, Sample
from support.marathon.page import figures, render, timeline
from support.marathon.traffic import CANCELLED_SHARE, CLASSES, PROMPTS, TENANTS, WAYS, asks

SECONDS = 600.0
REST = Rest(0.0, 0.0, 1e9, 200.0, 100.0, 1e7, ["run/engine.log"], {"tritonserver": 1, "python": 5})


def marathon() -> Run:
    """Make one that passes: four canaries and four requests a second, a kill, and connections that are reset."""
    run = Run(SECONDS, 4.0, REST, REST)
    for number in range(int(4 * SECONDS)):
        at = number / 4
        run.calls.append(Call("client", at, at + 0.1, is_canary=True, num_tokens=16))
        run.calls.append(Call("grpc", at, at + 1.0, first_token=0.2, num_tokens=60))
    run.faults = [
        Fault("engine killed", 100.0, 101.0, 105.0),
        Fault("connections reset", 300.0, 301.0, 303.0, opens_window=False),
    ]
    run.samples = [Sample(float(at), 1e9, 250.0, 110.0, 4.0, 0.0, 0.5) for at in range(0, int(SECONDS), 2)]
    return run


def soak() -> Run:
    run = marathon()
    run.faults = []
    return run


def change_canaries(run: Run, begin: float, end: float, **changes: object) -> None:
    """Change those sent in that time."""
    run.calls = [
        replace(call, **changes) if call.is_canary and begin <= call.sent < end else call  # type: ignore[arg-type]
        for call in run.calls
    ]


def change_calls(run: Run, change: Callable[[Call], Call]) -> None:
    run.calls = [change(call) for call in run.calls]


def change_samples(run: Run, **slopes: float) -> None:
    """Let figures grow by so much a second."""
    run.samples = [
        replace(sample, **{name: getattr(sample, name) + by * sample.at for name, by in slopes.items()})
        for sample in run.samples
    ]


def after(**changes: object) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.after = replace(REST, **changes)  # type: ignore[arg-type]

    return change


# Criterion → change of a marathon that breaks it, and no other.
BREAKS: dict[str, Callable[[Run], None]] = {
    "canaries that fail outside of windows": lambda run: change_canaries(run, 200, 206, error="TW-BUSY"),
    "their first attempts that fail": lambda run: change_canaries(run, 200, 206, first_error="TW-BUSY"),
    "canaries that fail inside": lambda run: change_canaries(run, 100, 102, error="TW-ENGINE-DEAD"),
    "recovery": lambda run: setattr(run.faults[0], "recovered", math.inf),
    "faults with an unexpected result": lambda run: setattr(run.faults[1], "surprise", "AssertionError: answered"),
    "requests with a wrong token": lambda run: change_canaries(run, 200, 200.2, has_right_tokens=False),
    "requests that never end": lambda run: run.calls.append(Call("http", 10.0, 70.0, error="TIMEOUT")),
    "KV blocks in use at the end": after(kv_use=0.01),
    "requests left in the engine": after(unfinished=1.0),
    "private memory, MiB": after(memory=1.2e9),
    "shared memory, MiB": after(shared_memory=1e8),
    "descriptors": after(descriptors=220.0),
    "threads": after(threads=120.0),
    "files of the run folder": after(files=[f"run/{number}" for number in range(20)]),
    "more processes, or none of a kind": after(processes={"tritonserver": 1, "python": 6}),
    "exit status of serve": lambda run: setattr(run, "exit_status", 1),
    "left by the ended server": lambda run: run.left_over.append("process 4711"),
    "log lines of a crash": lambda run: run.bad_lines.append("Segmentation fault"),
}
SOAK_BREAKS: dict[str, Callable[[Run], None]] = {
    "memory, first third to last": lambda run: change_samples(run, memory=2e5),
    "threads, first third to last": lambda run: change_samples(run, threads=0.1),
    "descriptors, first third to last": lambda run: change_samples(run, descriptors=0.1),
    "p99 of first tokens, first third to last": lambda run: change_calls(
        run, lambda call: replace(call, first_token=0.2 + call.sent / SECONDS) if call.first_token else call
    ),
    "p99 of canaries, first third to last": lambda run: change_calls(
        run, lambda call: replace(call, ended=call.ended + call.sent / SECONDS) if call.is_canary else call
    ),
}


def failed(verdicts: list[Verdict]) -> list[str]:
    return [one.criterion for one in verdicts if not one.passed]


@pytest.mark.parametrize("make", [marathon, soak])
def test_a_good_run_passes(make: Callable[[], Run]) -> None:
    assert failed(judge(make())) == []


@pytest.mark.parametrize("criterion", BREAKS)
def test_each_criterion_of_a_marathon_can_fail(criterion: str) -> None:
    run = marathon()
    BREAKS[criterion](run)
    assert failed(judge(run)) == [criterion]


@pytest.mark.parametrize("criterion", SOAK_BREAKS)
def test_each_criterion_of_a_soak_can_fail(criterion: str) -> None:
    run = soak()
    SOAK_BREAKS[criterion](run)
    assert failed(judge(run)) == [criterion]


def test_no_criterion_is_left_out() -> None:
    criteria = {one.criterion for run in (marathon(), soak()) for one in judge(run)}
    assert criteria == BREAKS.keys() | SOAK_BREAKS.keys()


def test_a_server_that_is_gone_fails() -> None:
    run = marathon()
    run.after = Rest(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, [], {})
    assert {"KV blocks in use at the end", "private memory, MiB", "threads"} <= set(failed(judge(run)))


def test_a_run_without_canaries_fails() -> None:
    run = marathon()
    run.calls = [call for call in run.calls if not call.is_canary]
    assert "canaries that fail outside of windows" in failed(judge(run))


def test_a_window_ends_with_the_recovery_or_its_limit() -> None:
    run = marathon()
    assert run.faults[0].window == (100.0, 105.0)
    assert Fault("", 1.0, 2.0, math.inf).window == (1.0, 2.0 + RECOVERY_LIMIT_S)
    inside = [Call("http", sent, ended) for sent, ended in ((99.0, 100.5), (104.0, 109.0), (90.0, 120.0))]
    outside = [Call("http", sent, ended) for sent, ended in ((98.0, 99.5), (105.5, 109.0), (300.5, 300.9))]
    assert [run.is_inside(call) for call in inside + outside] == [True] * 3 + [False] * 3


def test_one_slow_minute_is_no_trend() -> None:
    calls = [Call("client", at, at + (9.0 if 60 <= at < 120 else 0.1), is_canary=True) for at in range(300)]
    assert p99(calls, LATENCIES["canaries"], 0, 300) == pytest.approx(0.1)


@pytest.mark.parametrize("make", [marathon, soak])
def test_the_page_shows_every_verdict(make: Callable[[], Run]) -> None:
    run = make()
    run.samples.append(Sample(SECONDS, 1e9, 250.0, 110.0))  # while the metrics cannot be read
    machine = {"processor": "a processor", "cores": 2, "gpu": None, "system": "Linux"}
    about = {"commit": "c0ffee", "started": "today", "command": "make", "machine": machine, "versions": {}}
    verdicts = judge(run)
    page = render("Marathon", run, verdicts, timeline(run), about)
    assert page.startswith("<!doctype html>")
    assert all(verdict.criterion in page for verdict in verdicts)
    assert figures(run)["canaries"] == 4 * SECONDS


def test_faults_come_in_rounds_of_each() -> None:
    names = list(KINDS)
    drawn = list(islice(order(names, seed=1), 2 * len(names)))
    assert Counter(name for name, _, _ in drawn) == dict.fromkeys(names, 2)
    assert drawn == list(islice(order(names, seed=1), 2 * len(names)))
    assert all(HOLD_S[0] <= hold_s <= HOLD_S[1] for _, _, hold_s in drawn)
    assert list(order([], seed=1)) == []


def test_the_load_has_every_class_tenant_and_way() -> None:
    ids = {prompt: [1, 2, 3] for prompt in PROMPTS}
    sent = list(asks(ids, rate=10.0, seconds=400.0, seed=1))
    assert len(sent) == pytest.approx(4000, rel=0.1)
    assert {ask.parameters["priority"] for ask in sent} == set(CLASSES)
    assert {ask.parameters["tenant"] for ask in sent} == set(TENANTS)
    assert {ask.way for ask in sent} == set(WAYS)
    num_cancelled = sum(ask.cancel_after_s is not None for ask in sent)
    assert num_cancelled / len(sent) == pytest.approx(CANCELLED_SHARE, rel=0.2)
