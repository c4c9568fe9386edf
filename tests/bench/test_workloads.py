"""What is asked for."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import OfferedRequest
from tidewheel.bench.workloads import (
    FIRST_ID,
    SHAREGPT_INPUT,
    SHAREGPT_OUTPUT,
    WORKLOADS,
    Workload,
    parse_workload,
)
from tidewheel.errors import ConfigError

VOCAB = 500


def workload(name: str, **changes: str) -> Workload:
    return parse_workload(name, **changes, vocab=VOCAB, max_tokens=4096)


def first_turns(of: Workload, count: int, seed: int = 0) -> list[OfferedRequest]:
    return [conversation[0] for conversation in islice(of.conversations(seed), count)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_requests_and_another_one_others(name: str) -> None:
    of = workload(name)
    same = [list(islice(of.conversations(7), 40)) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != list(islice(of.conversations(8), 40))


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_lie_in_the_vocabulary_and_requests_in_the_context(name: str) -> None:
    of = parse_workload(name, vocab=VOCAB, max_tokens=300)
    for conversation in islice(of.conversations(0), 300):
        total = 0
        for turn in conversation:
            assert all(FIRST_ID <= token_id < VOCAB for token_id in turn.input_ids)
            assert turn.num_output_tokens >= 1
            total += len(turn.input_ids) + turn.num_output_tokens
        assert conversation
        assert total <= 300


def test_the_mix_has_text_images_and_speech() -> None:
    turns = first_turns(workload("mix"), 20_000)
    shares = {entry: count / len(turns) for entry, count in Counter(turn.entry for turn in turns).items()}
    assert shares == pytest.approx({"": 0.7, "image": 0.2, "speech": 0.1}, abs=0.02)


def test_sharegpt_lengths_have_the_published_means_and_a_heavy_tail() -> None:
    turns = first_turns(workload("sharegpt"), 20_000)
    inputs = sorted(len(turn.input_ids) for turn in turns)
    outputs = [turn.num_output_tokens for turn in turns]
    assert sum(inputs) / len(inputs) == pytest.approx(SHAREGPT_INPUT, rel=0.03)
    assert sum(outputs) / len(outputs) == pytest.approx(SHAREGPT_OUTPUT, rel=0.03)
    assert inputs[len(inputs) // 2] < 0.75 * SHAREGPT_INPUT  # half of them are far below the mean
    assert max(inputs) == 1024


def test_sharegpt_scales() -> None:
    turns = first_turns(workload("sharegpt:0.25"), 20_000)
    assert sum(len(turn.input_ids) for turn in turns) / len(turns) == pytest.approx(SHAREGPT_INPUT / 4, rel=0.03)


def test_fixed_lengths_are_fixed() -> None:
    turns = first_turns(workload("fixed", inputs="constant:17", outputs="constant:5"), 50)
    assert {(len(turn.input_ids), turn.num_output_tokens) for turn in turns} == {(17, 5)}


def test_a_range_has_both_its_ends() -> None:
    turns = first_turns(workload("mixed", inputs="range:3:5", outputs="range:7:7"), 300)
    assert {len(turn.input_ids) for turn in turns} == {3, 4, 5}
    assert {turn.num_output_tokens for turn in turns} == {7}


@pytest.mark.parametrize("text", ["range", "range:1", "range:5:3", "range:0:3", "range:a:b", "range:1:2:3"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(BenchError, match=r"--input is 'range.*': write range:LOW:HIGH"):
        workload("mixed", inputs=text)


def test_no_two_prompts_are_alike_unless_they_share_a_prefix() -> None:
    plain = first_turns(workload("mixed"), 200)
    assert len({tuple(turn.input_ids[:8]) for turn in plain if len(turn.input_ids) >= 8}) > 150
    shared = first_turns(workload("shared-prefix"), 200)
    assert len({tuple(turn.input_ids[:256]) for turn in shared}) == 1
    assert len({tuple(turn.input_ids) for turn in shared}) == 200


def test_a_chat_has_turns_with_pauses_in_a_session_of_its_own() -> None:
    chats = list(islice(workload("chat").conversations(0), 500))
    assert {len(chat) for chat in chats} == {4}
    sessions = [{turn.parameters["session_id"] for turn in chat} for chat in chats]
    assert all(len(session) == 1 for session in sessions)
    assert len(set.union(*sessions)) == 500
    pauses = [turn.think_s for chat in chats for turn in chat[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(1.0, rel=0.1)
    assert all(chat[0].think_s == 0.0 for chat in chats)


def test_classes_come_in_their_shares() -> None:
    counts = Counter(turn.parameters["priority"] for turn in first_turns(workload("qos"), 10_000))
    assert {priority: count / 10_000 for priority, count in counts.items()} == pytest.approx(
        {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.3}, abs=0.02
    )


@pytest.mark.parametrize("name", ["nothing", "sharegpt:none", "sharegpt:0", "fixed:3", "trace", "trace:"])
def test_unknown_workloads_are_refused(name: str) -> None:
    with pytest.raises(BenchError, match="--workload"):
        workload(name)


def test_a_bad_length_names_its_option() -> None:
    with pytest.raises(ConfigError, match="--output is 'normal:3'"):
        workload("fixed", outputs="normal:3")


def test_a_trace_has_its_own_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 3, "output_tokens": 2}\n')
    with pytest.raises(BenchError, match="do not go with a trace"):
        workload(f"trace:{path}", inputs="constant:4")


def test_a_recorded_session_grows_and_a_recorded_group_begins_alike(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 1, "prompt_tokens": 10, "output_tokens": 2, "session": "a", "priority": 1}\n'
        '{"arrival": 2.5, "prompt_tokens": 30, "output_tokens": 2, "session": "a", "tenant": "t"}\n'
        '{"arrival": 3, "prompt_tokens": 9, "output_tokens": 2, "prefix_group": "g", "prefix_tokens": 6}\n'
        '{"arrival": 4, "prompt_tokens": 9, "output_tokens": 2, "prefix_group": "g", "prefix_tokens": 6, '
        '"deadline_s": 1.5}\n'
    )
    first, second, third, fourth = (turns[0] for turns in workload(f"trace:{path}").conversations(0))
    assert [turn.at for turn in (first, second, third, fourth)] == [0.0, 1.5, 2.0, 3.0]
    assert second.input_ids[:10] == first.input_ids
    assert first.parameters == {"priority": 1, "session_id": "a"}
    assert second.parameters["tenant"] == "t"
    assert third.input_ids[:6] == fourth.input_ids[:6]
    assert third.input_ids != fourth.input_ids
    assert fourth.parameters["deadline_ms"] == 1500


def test_a_trace_says_how_much_of_it_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,900,20\n2023-11-16 18:17:04,4090,20\n"
    )
    recorded = workload(f"trace:{path}").summary()
    assert recorded["name"] == "trace:azure.csv"
    assert recorded["source"].startswith("2 requests, SHA-256 ")
    assert recorded["source"].endswith(", 1 of them cut to 4096 tokens")
