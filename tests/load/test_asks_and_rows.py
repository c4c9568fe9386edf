"""What a user asks, and what locust is told of the answer."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tidewheel_client.errors import Busy, RequestTimeout
from tidewheel_client.load import load_options
from tidewheel_client.load.load_options import LoadRequest, Reporter, Timing, Work

ASK = LoadRequest("a b", "high", {})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Event:
    def __init__(self) -> None:
        self.fired: list[tuple[Any, ...]] = []

    def fire(self, **e: Any) -> None:
        self.fired.append(
            (e["request_type"], e["name"], round(e["response_time"], 6), e["response_length"], e["exception"])
        )


def changed(arguments: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), **changes})


def asks(work: Work, count: int = 400) -> list[LoadRequest]:
    return [work.next() for _ in range(count)]


def test_users_repeat_themselves_and_nobody_else(arguments: argparse.Namespace) -> None:
    assert asks(Work(arguments, "0 0")) == asks(Work(arguments, "0 0"))
    assert asks(Work(arguments, "0 0")) != asks(Work(arguments, "0 1"))
    assert asks(Work(arguments, "0 0")) != asks(Work(changed(arguments, load_seed=1), "0 0"))


def test_work_follows_the_options(arguments: argparse.Namespace, tmp_path: Path) -> None:
    options = changed(
        arguments,
        prompt_words="3-5",
        output_tokens="7-9",
        qos_mix="critical=1,low=3",
        tenants="a=1,b=1",
        stop_at_eos=True,
        think_time="1-2",
    )
    work = Work(options, "x")
    all_asks = asks(work)
    assert {len(ask.prompt.split()) for ask in all_asks} == {3, 4, 5}
    assert {ask.parameters["max_tokens"] for ask in all_asks} == {7, 8, 9}
    assert {ask.parameters["tenant"] for ask in all_asks} == {"a", "b"}
    assert 140 < Counter(ask.parameters["tenant"] for ask in all_asks)["a"] < 260
    assert 60 < Counter(ask.qos for ask in all_asks)["critical"] < 140
    assert {ask.parameters["priority"] for ask in all_asks} == {1, 4}
    assert not any(ask.parameters["ignore_eos"] for ask in all_asks)
    assert all(1 <= work.think_time() <= 2 for _ in range(20))


def test_prompts_of_a_file(arguments: argparse.Namespace, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    work = Work(changed(arguments, prompt_file=str(tmp_path / "prompts")), "x")
    assert {ask.prompt for ask in asks(work)} == {"one", "two"}


def test_rows_of_a_stream(clock: Clock) -> None:
    event, timing = Event(), Timing(clock)
    for after, tokens in ((0.5, 0), (0.5, 1), (0.2, 2), (0.2, 2)):
        clock.now += after
        timing.arrived(tokens, 10)
    clock.now += 0.1
    Reporter(event, "SSE", "demo").report(ASK, timing)
    assert event.fired == [
        ("SSE", "demo high", 1500, 40, None),
        ("TTFT", "SSE demo high", 1000, 0, None),
        ("TPOT", "SSE demo high", 100, 0, None),
    ]


def test_one_token_has_no_time_between(clock: Clock) -> None:
    event, timing = Event(), Timing(clock)
    clock.now += 0.25
    timing.arrived(1, 3)
    Reporter(event, "GRPC", "demo").report(ASK, timing)
    assert [row[0] for row in event.fired] == ["GRPC", "TTFT"]
    assert timing.tpot_ms is None


def test_no_token_at_all(clock: Clock) -> None:
    event, timing = Event(), Timing(clock)
    Reporter(event, "GRPC", "demo").report(ASK, timing)
    assert [row[0] for row in event.fired] == ["GRPC"]


def test_a_whole_answer_has_no_first_token(clock: Clock) -> None:
    event, timing = Event(), Timing(clock)
    clock.now += 2
    timing.arrived(5, 30)
    Reporter(event, "INFER", "demo_infer").report(ASK, timing)
    assert event.fired == [("INFER", "demo_infer high", 2000, 30, None)]


def test_failures_are_counted_by_tag(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    load_options._logged.clear()
    event, timing = Event(), Timing(clock)
    reporter = Reporter(event, "GRPC", "demo")
    clock.now += 0.5
    for limit in (250, 500):
        reporter.report(ASK, timing, Busy(f"{limit} of 512", retry_after_ms=limit))
    reporter.report(ASK, timing, RequestTimeout("too late"))
    assert event.fired == [("GRPC", "demo high", 500, 0, label) for label in ("TW-BUSY", "TW-BUSY", "RequestTimeout")]
    assert [record.getMessage() for record in caplog.records] == [
        "first TW-BUSY of GRPC users: [TW-BUSY retry_after_ms=250] 250 of 512",
        "first RequestTimeout of GRPC users: too late",
    ]
