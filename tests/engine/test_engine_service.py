"""Several sequences, deadlines, sessions and full waiting sets, through a real engine process with a fake device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support.engine.engine_clients import Client, Recorder, endless, request
from support.engine.fake_engine import write_model_folder
from support.engine.fake_runner import naive_output
from support.engine.faulty_engine import DIES, RAISES
from support.engine.targets import new_target
from support.scheduler.scheduling import make_request
from tidewheel.config import EngineConfig
from tidewheel.engine.engine_client import MAX_REFUSED_TENANTS, EngineClient
from tidewheel.engine.messages import Delta
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import to_source

Connect = Callable[..., Client]


def expected(*token_ids: int, max_tokens: int = 8) -> list[int]:
    return naive_output(make_request(prompt=token_ids, max_tokens=max_tokens))[0]


def moment(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_sequences_end_one_by_one(connect: Connect) -> None:
    client = connect()
    client.add(request(1, 5, 6, 7, n=3))
    client.recorder.wait_ended(1, (1, 1), (1, 2))
    for key in (1, (1, 1), (1, 2)):
        assert client.recorder.tokens[key] == expected(5, 6, 7)
        assert client.recorder.endings[key] == "length"


def test_one_sequence_is_cancelled(connect: Connect) -> None:
    client = connect()
    client.add(endless(1, n=3))
    client.recorder.wait_started(1, (1, 1), (1, 2))
    client.cancel(1, 1)
    client.recorder.wait_ended((1, 1))
    assert client.recorder.endings == {(1, 1): "cancelled"}
    client.cancel(1, 1)  # once more, and one that never was
    client.cancel(1, 9)
    client.cancel(1)
    client.recorder.wait_ended(1, (1, 2))
    assert set(client.recorder.endings.values()) == {"cancelled"}
    assert set(client.recorder.num_endings.values()) == {1}


def test_cancelled_before_all_sequences_started(connect: Connect) -> None:
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1))
    client.add(endless(1, n=4))
    client.recorder.wait_started(1)
    client.cancel(1)
    client.recorder.wait_ended(1, (1, 1), (1, 2), (1, 3))
    client.add(request(2, 5))
    client.recorder.wait_ended(2)
    assert client.recorder.tokens[2] == expected(5)


@pytest.mark.parametrize("n", [0, 17])
def test_a_number_of_sequences_that_is_refused(connect: Connect, n: int) -> None:
    client = connect()
    message = request(1, 5)
    msgspec.structs.force_setattr(message.options, "n", n)
    client.add(message)
    client.recorder.wait_ended(1)
    assert client.recorder.errors[1] == f"n is {n}: it must be 1 to 16"


def test_all_sequences_wait_or_none(connect: Connect) -> None:
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1, max_waiting_requests=3))
    client.add(endless(1))
    client.recorder.wait_started(1)
    client.add(request(2, 5, n=2))
    client.add(request(3, 5, n=2))
    client.recorder.wait_ended(3)
    assert client.recorder.errors[3].startswith("waiting set is full")
    client.add(request(4, 5))
    client.cancel(1)
    client.recorder.wait_ended(2, (2, 1), 4)


def note_full(client: Client) -> list[Delta]:
    """The deltas to come that say that the waiting set is full."""
    full: list[Delta] = []
    on_deltas = client.recorder.on_deltas

    def watch(deltas: list[Delta]) -> None:
        full.extend(delta for delta in deltas if delta.error is not None and delta.error.is_waiting_set_full)
        on_deltas(deltas)

    client.recorder.on_deltas = watch  # type: ignore[method-assign]
    return full


def test_a_full_waiting_set_is_told_from_other_refusals(connect: Connect) -> None:
    tenants = '{"poor": {"requests_per_s": 0.001}}'
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1, max_waiting_requests=1, tenants=tenants))
    full = note_full(client)
    client.add(request(1, 5, tenant="poor"))
    client.recorder.wait_ended(1)
    client.add(request(2, 5, tenant="poor"))
    client.recorder.wait_ended(2)
    assert client.recorder.endings[2] == "TW-BUSY"
    assert "poor" in client.recorder.errors[2]
    assert full == []
    client.add(endless(3))
    client.recorder.wait_started(3)
    client.add(request(4, 5))
    client.add(request(5, 5))
    client.recorder.wait_ended(5)
    assert [delta.key for delta in full] == [5]
    client.cancel(3)
    client.recorder.wait_ended(4)


def test_a_class_that_was_lowered_is_said_and_figures_by_tenant_come(connect: Connect) -> None:
    tenants = '{"capped": {"max_priority": 3}}'
    client = connect(config=EngineConfig(model="ok", tenants=tenants))
    granted: dict[int, int] = {}
    on_deltas = client.recorder.on_deltas

    def watch(deltas: list[Delta]) -> None:
        granted.update({delta.key: delta.stats.priority for delta in deltas if delta.stats is not None})
        on_deltas(deltas)

    client.recorder.on_deltas = watch  # type: ignore[method-assign]
    client.add(request(1, 5, tenant="capped", priority=1))
    client.add(request(2, 5, tenant="invented", priority=1))
    client.recorder.wait_ended(1, 2)
    assert granted == {1: 3, 2: 1}

    def labels_with_tokens() -> set[str]:
        tenants = client.recorder.stats[-1].tenants
        return {label for label, figures in tenants.items() if figures.num_output_tokens}

    client.recorder.wait(lambda: labels_with_tokens() == {"capped", "other"}, "figures")


def test_requests_that_a_front_end_refused_count_for_their_tenant(connect: Connect) -> None:
    client = connect(config=EngineConfig(model="ok", tenants='{"acme": {}}'))
    client.count_refused("acme", 3)
    client.count_refused("invented", 1)

    def rejected() -> dict[str, tuple[int, int]]:
        tenants = client.recorder.stats[-1].tenants
        return {label: (figures.num_requests, figures.num_rejected) for label, figures in tenants.items()}

    client.recorder.wait(lambda: rejected() == {"acme": (3, 3), "other": (1, 1)}, "figures")


def test_the_names_that_one_ping_reports_are_bounded(tmp_path: Path) -> None:
    client = EngineClient(new_target(tmp_path, EngineConfig(model="ok")), Recorder(), name="front end")
    for number in range(MAX_REFUSED_TENANTS + 10):
        client.count_refused(f"t{number}", 1)
    refused = client._take_refused()
    assert len(refused) == MAX_REFUSED_TENANTS + 1 and refused[""] == 10
    assert not client._take_refused()
    client.close()


def test_a_better_class_takes_the_place_of_a_lower_one(connect: Connect) -> None:
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1, max_waiting_requests=2))
    client.add(endless(1, priority=1))
    client.recorder.wait_started(1)
    client.add(request(2, 5, priority=4))
    client.add(request(3, 5, priority=4))
    client.add(request(4, 5, priority=2))
    client.recorder.wait_ended(3)  # the newest of the lowest class
    assert client.recorder.endings[3] == "TW-BUSY"
    assert "took the place" in client.recorder.errors[3]
    client.cancel(1)
    client.recorder.wait_ended(4, 2)
    assert client.recorder.num_endings[3] == 1


def test_a_deadline_while_it_runs(connect: Connect) -> None:
    client = connect()
    client.add(endless(1, deadline_ns=moment(0.5)))
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "deadline"
    assert client.recorder.tokens[1] == expected(1, 2, 3, max_tokens=4000)[: len(client.recorder.tokens[1])]
    assert client.recorder.tokens[1]


def test_a_deadline_in_the_queue(connect: Connect) -> None:
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1))
    client.add(endless(1))
    client.recorder.wait_started(1)
    client.add(request(2, 5, deadline_ns=moment(0.3)))
    client.add(request(3, 5, deadline_ns=moment(-1.0)))
    client.recorder.wait_ended(2, 3)
    for key in (2, 3):
        assert client.recorder.endings[key] == "TW-DEADLINE"
        assert client.recorder.tokens[key] == []
    client.cancel(1)
    client.recorder.wait_ended(1)


def test_a_session_is_closed_once(connect: Connect) -> None:
    client = connect()
    client.add(request(1, *range(2, 30), session_id="s", tenant="acme"))
    client.recorder.wait(lambda: client.recorder.stats[-1].num_sessions == 1, "the session")
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "length"
    for key, tenant in ((2, "other"), (3, "acme"), (4, "acme")):
        client.add(request(key, session_id="s", tenant=tenant, close_session=True))
    client.recorder.wait_ended(2, 3, 4)
    assert [client.recorder.endings[key] for key in (2, 3, 4)] == ["TW-NOT-FOUND", "stop", "TW-NOT-FOUND"]
    client.recorder.wait(lambda: client.recorder.stats[-1].num_sessions == 0, "no session")


def test_a_session_pauses_while_its_tools_run(connect: Connect) -> None:
    client = connect()
    client.add(request(1, *range(2, 30), session_id="s", tenant="acme"))
    client.recorder.wait_ended(1)
    for key, tenant in ((2, "acme"), (3, "other")):  # that has no such session
        client.add(request(key, session_id="s", tenant=tenant, pause_session=("search", "read")))
    client.recorder.wait_ended(2, 3)
    assert [client.recorder.endings[key] for key in (2, 3)] == ["stop", "stop"]
    client.recorder.wait(lambda: client.recorder.stats[-1].num_paused_sessions == 1, "the pause")
    client.add(request(4, *range(2, 40), session_id="s", tenant="acme"))
    client.recorder.wait_ended(4)
    client.recorder.wait(lambda: client.recorder.stats[-1].num_paused_sessions == 0, "no pause")
    assert client.recorder.stats[-1].num_sessions == 1


def test_requests_with_grammars_wait_for_them_alone(connect: Connect, tmp_path: Path) -> None:
    """The fake device follows no grammar; here it is about who waits, and how it ends."""
    write_model_folder(tmp_path)
    client = connect(config=EngineConfig(model="ok", tokenizer=str(tmp_path)))
    names = {f"p{i}": {"type": "string"} for i in range(2000)}  # a second to compile
    large = to_source(Grammar.json_schema({"type": "object", "properties": names}))
    ends = {"stop_token_ids": (2,), "end_token_ids": (2,)}
    client.add(request(1, 5, grammar=large, grammar_name="guided_json", **ends))
    client.add(request(2, 5, grammar=large, grammar_name="guided_json", **ends))
    client.add(request(3, 5, grammar=to_source(Grammar.regex("a+")), grammar_name="guided_regex", n=2, **ends))
    client.add(request(4, 5, grammar="wrong", grammar_name="guided_regex", **ends))
    client.add(request(5, 5, 6, 7))
    client.recorder.wait_started(5)  # so 2 has been sent
    client.cancel(2)
    client.recorder.wait_ended(1, 2, 3, (3, 1), 4, 5)
    endings = client.recorder.endings
    assert (endings[1], endings[2], endings[3], endings[4], endings[5]) == (
        "length", "cancelled", "length", "TW-INPUT", "length",
    )  # fmt: skip
    assert "guided_regex cannot be followed" in client.recorder.errors[4]
    assert client.recorder.tokens[5] == expected(5, 6, 7)
    client.add(request(6, 5, grammar=large, grammar_name="guided_json"))
    client.recorder.wait_ended(6)
    assert "guided_json needs a token that ends the answer" in client.recorder.errors[6]
    assert set(client.recorder.num_endings.values()) == {1}


@pytest.mark.parametrize("fault", [DIES, RAISES])
def test_an_engine_that_dies_while_a_request_waits_for_its_grammar(
    connect: Connect, tmp_path: Path, fault: int
) -> None:
    write_model_folder(tmp_path)
    client = connect(config=EngineConfig(model="ok", tokenizer=str(tmp_path)))
    names = {f"p{i}": {"type": "string"} for i in range(2000)}  # a second to compile
    large = to_source(Grammar.json_schema({"type": "object", "properties": names}))
    fields = {"grammar_name": "guided_json", "stop_token_ids": (2,), "end_token_ids": (2,)}
    client.add(endless(1, grammar=large, **fields))
    client.add(request(2, fault))
    client.recorder.wait_ended(1, 2)
    assert [client.recorder.endings[key] for key in (1, 2)] == ["TW-ENGINE-DEAD"] * 2
    client.add(request(3, 5, grammar=to_source(Grammar.regex("a+")), **fields))
    client.recorder.wait_ended(3)
    assert client.recorder.endings[3] == "length"
