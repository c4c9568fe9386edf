"""Parts of `benchmarks/cluster/replicas.py`, against servers that answer what is known."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from cluster.gateway_latency import first_token_s, matched
from cluster.named_gateway import NAME, name_service
from cluster.replica_cases import deaths, max_over_mean
from cluster.replicas import judged
from cluster.user_load import Outcome, Users, percent
from common.stream_readers import Asked, OpenAiReader
from support.gateway.running_gateway import gateway_to, perf, uints
from support.triton.grpc_triton import Answer, FakeTriton, Refused, response, running
from support.triton.grpc_triton import Asked as AskedTriton
from support.triton.serving import wait_for

KILLED = 100.0


def outcome(sent: float, first: float, ended: float, *, error: str = "", num_tokens: int = 2) -> Outcome:
    return Outcome(2, sent=sent, first=first, ended=ended, error=error, num_tokens=num_tokens)


def test_what_a_death_costs() -> None:
    found = deaths(
        [
            outcome(90, 91, 92),  # before
            outcome(99, 99.5, 100.25, error="[TW-X] lost"),  # begun
            outcome(99, 99.5, 103),  # begun elsewhere
            outcome(99.8, 100.01, 100.2, error="[TW-X] lost"),  # begun while the signals were sent
            outcome(99.5, 0, 104, num_tokens=0),  # without an answer or an error
            outcome(99.9, 101, 103),  # not begun, and sent again
            outcome(100.5, 0, 100.6, error="no server"),  # later
        ],
        KILLED,
        users=4,
    )
    assert (found["begun"], found["begun_broken"], found["told_after_s"]) == (3, 2, 0.25)
    assert (found["not_begun"], found["not_begun_lost"], found["other_requests_lost"]) == (2, 1, 1)
    assert found["begun_without_error_or_end"] == 0
    assert found["errors"] == ["[TW-X] lost", "no server"]


def test_a_begun_stream_that_ends_early_without_an_error_is_told() -> None:
    assert deaths([outcome(99, 99.5, 101, num_tokens=1)], KILLED, users=1)["begun_without_error_or_end"] == 1


def test_turns_that_found_their_cache() -> None:
    turns = [Outcome(1, 1, num_cachable=128, num_tokens=1, num_cached=cached) for cached in (128, 130, 64)]
    broken = Outcome(1, 1, num_cachable=128, error="lost")
    assert percent([Outcome(1, num_tokens=1), *turns, broken]) == 66.67


def test_arrivals_are_paired_with_the_nearest() -> None:
    here = [1.0, 2.0, 3.0, 4.0, 5.0]
    there = [1.1, 2.1, 2.9, 4.2, 5.1]
    assert matched(here, there) == pytest.approx([0.1, -0.1, 0.2])


def test_load_is_even_or_not() -> None:
    assert max_over_mean([4, 4, 4, 4]) == 1.0
    assert max_over_mean([8, 4, 4, 0]) == 2.0
    assert max_over_mean([0, 0]) == 1.0


def test_goals_of_what_was_measured_are_judged() -> None:
    found = {
        "throughput": [{"of_linear": 1, "of_all_cores": 0.1}, {"of_linear": 0.96, "of_all_cores": 0.61}],
        "kill": {"not_begun_lost": 0, "told_after_s": 1.2},
    }
    assert [(row["part"], row["value"], row["met"]) for row in judged(found)] == [
        ("throughput", 0.96, True),
        ("throughput", 0.61, False),
        ("kill", 0, True),
        ("kill", 1.2, False),
    ]


def test_a_name_has_the_addresses_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "names"
    find = name_service(file)
    file.write_text("127.0.0.1\n127.0.0.2")
    assert [info[4] for info in find(NAME, 80)] == [("127.0.0.1", 80), ("127.0.0.2", 80)]
    assert find("127.0.0.3", 80, type=socket.SOCK_STREAM)[0][4] == ("127.0.0.3", 80)
    file.write_text("")
    with pytest.raises(socket.gaierror):
        find(NAME, 80)


def say_two(asked: AskedTriton) -> Answer:
    """Answer with a token, and another one with the usage."""
    yield response(asked.message, text_output=" t0", finish_reason="None", num_output_tokens=uints(1))
    yield response(
        asked.message,
        text_output=" t0",
        finish_reason="length",
        num_input_tokens=uints(150),
        **{"num_output_tokens": uints(1), **perf(128)},
    )


def converse(url: str, *, num_outcomes: int) -> list[Outcome]:
    users = Users(url.removeprefix("http://"), "demo", turns=2, prompt_tokens=150, answer_tokens=2)

    async def run() -> list[Outcome]:
        async with users.active(1):
            await asyncio.to_thread(lambda: wait_for(lambda: len(users.outcomes) > num_outcomes, 60, "outcomes"))
        return users.outcomes

    return asyncio.run(run())


def test_users_hold_conversations() -> None:
    with running(FakeTriton(answer=say_two)) as triton, gateway_to(triton.port) as gateway:
        outcomes = converse(gateway.url, num_outcomes=3)
    assert all(one.is_whole and one.sent <= one.first <= one.ended for one in outcomes)
    assert [(one.turn, one.num_cachable, one.num_cached) for one in outcomes[:4]] == 2 * [(0, 0, 128), (1, 128, 128)]
    assert percent(outcomes) == 100.0


def test_users_note_errors() -> None:
    def break_off(asked: AskedTriton) -> Answer:
        yield response(asked.message, text_output=" t0", finish_reason="None", num_output_tokens=uints(1))
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-ENGINE-DEAD] the engine died")

    with running(FakeTriton(answer=break_off)) as triton, gateway_to(triton.port) as gateway:
        (first, *_) = converse(gateway.url, num_outcomes=2)
    assert first.error == "[TW-ENGINE-DEAD] the engine died"
    assert first.first > 0 and not first.is_whole


def test_streams_of_a_gateway_are_read_one_after_the_other() -> None:
    with running(FakeTriton(answer=say_two)) as triton, gateway_to(triton.port) as gateway:
        reader = OpenAiReader(Asked(gateway.url.removeprefix("http://"), "demo", 2), again=False)
        assert all(first_token_s(reader) > 0 for _ in range(3))
        assert reader.num_ended == 3
        reader.socket.close()
    assert len(triton.asked) == 3
