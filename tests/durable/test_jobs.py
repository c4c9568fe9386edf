"""Jobs and files of jobs: what is let in, and what the refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.durable.needed  # noqa: F401
from tidewheel_client.errors import InvalidRequest, PromptTooLarge
from tidewheel_queue.jobs import MAX_JOB_BYTES, Job, PackedJob, read_jobs

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: (
    st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({}, "exactly one of prompt"),
        ({"prompt": "x", "input_ids": [1]}, "exactly one of prompt"),
        ({"prompt": 3}, "prompt is 3: it must be text"),
        ({"promt": "x"}, "unknown field 'promt': did you mean 'prompt'?"),
        ({"prompt": "x", "max_tokens": 3}, "unknown field 'max_tokens': sampling parameters go into 'params'"),
        ({"prompt": "x", "priority": 5}, "priority is 5: it must be 1 to 4"),
        ({"prompt": "x", "priority": True}, "priority is True"),
        ({"prompt": "x", "priority": "best"}, "priority is 'best': it must be 1 to 4, a class by name"),
        ({"prompt": "x", "deadline_ms": 0}, "deadline_ms is 0"),
        ({"prompt": "x", "deadline_ms": float("inf")}, "deadline_ms is inf"),
        ({"prompt": "x", "stream": "yes"}, "stream is 'yes'"),
        ({"prompt": "x", "params": []}, "params is []"),
        ({"prompt": "x", "params": {"tenant": "me"}}, "params has 'tenant'"),
        ({"prompt": "x", "params": {"n": 2}}, "n is 2: a job has one answer"),
        ({"prompt": "x", "params": {"top_p": float("nan")}}, "no JSON"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "x", "id": "a b"}, "id 'a b': 1 to 128 characters"),
        ({"prompt": "x", "id": "x" * 129}, "1 to 128 characters"),
        ({"prompt": "x", "id": "a}{b"}, "1 to 128 characters"),
        ({"prompt": "x", "id": "a\n"}, "1 to 128 characters"),
        ({"input_ids": [1, -1]}, "input_ids is [1, -1]"),
        ({"input_ids": "12"}, "input_ids is '12'"),
        ({"prompt": "x", "priority": "\ud800"}, r"priority is '\ud800': it must be 1 to 4"),
        ([1], "a job is a JSON object, not [1]"),
    ],
)
def test_wrong_jobs_are_refused(job: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        PackedJob.of(job)
    assert words in raised.value.message


@pytest.mark.parametrize(("name", "number"), [("critical", 1), ("High", 2), (" NORMAL", 3), ("low", 4)])
def test_a_class_may_be_named(name: str, number: int) -> None:
    packed = PackedJob.of({"prompt": "x", "priority": name})
    assert (packed.class_number, Job.of_payload(packed.payload).priority) == (number, number)


def test_a_float_may_be_of_a_subclass() -> None:
    class Measured(float):  # as numpy's float64
        pass

    packed = PackedJob.of({"prompt": "x", "deadline_ms": Measured(2.5), "session_ttl_s": Measured(9)})
    job = Job.of_payload(packed.payload)
    assert (job.deadline_ms, job.session_ttl_s) == (2.5, 9)


def test_a_job_is_bounded() -> None:
    assert PackedJob.of({"prompt": "x" * (MAX_JOB_BYTES - 13)})
    with pytest.raises(PromptTooLarge, match=f"the job has 1048577 bytes; at most {MAX_JOB_BYTES} are kept"):
        PackedJob.of({"prompt": "x" * (MAX_JOB_BYTES - 12)})


@given(
    prompt=TEXT,
    priority=st.integers(0, 4),
    deadline_ms=st.none() | st.floats(1, 1e9),
    tenant=st.none() | TEXT,
    stream=st.booleans(),
    params=st.dictionaries(TEXT.filter(lambda key: key.startswith("k")), st.integers() | st.booleans() | TEXT),
)
def test_a_job_comes_back_as_it_was(**fields: Any) -> None:
    job = Job(**fields)
    packed = PackedJob.of(job)
    assert Job.of_payload(packed.payload) == job
    assert packed.class_number == (job.priority or 3)
    assert packed.stream == job.stream


@given(JSON)
def test_any_json_is_a_job_or_refused(value: object) -> None:
    try:
        PackedJob.of(value)  # type: ignore[arg-type]
    except InvalidRequest:
        return
    assert isinstance(value, dict)


@given(st.lists(st.binary()))
def test_any_bytes_are_jobs_or_refused(lines: list[bytes]) -> None:
    try:
        jobs = read_jobs(line + b"\n" for line in lines)
    except InvalidRequest as error:
        assert error.message.startswith("line ")
    else:
        assert len(jobs) <= len(lines)


def test_lines_have_ids_of_the_file_and_their_numbers() -> None:
    lines = [b'{"prompt": "a"}\n', b"\n", b'{"prompt": "b", "id": "mine"}\n', b'{"prompt": "a"}']
    first, again = read_jobs(lines), read_jobs(lines)
    assert first == again
    assert [job["prompt"] for job in first] == ["a", "b", "a"]
    assert len({str(job["id"]) for job in first}) == 3
    assert str(first[2]["id"]).endswith("-4")
    assert read_jobs([*lines, b"\n"])[0]["id"] != first[0]["id"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([b'{"prompt": "a"}', b"{"], "line 2: this is no JSON"),
        ([b'{"prompt": "a", "top_p": NaN}'], "line 1: this is no JSON (NaN"),
        ([b"\xff"], "line 1: this is no JSON"),
        ([b"[" * 100_000], "line 1: "),
        (
            [b'{"prompt": "a", "id": "x"}', b"\n", b'{"prompt": "a", "id": "x"}'],
            "line 3: id 'x' is that of line 1 too",
        ),
        ([json.dumps({"prompt": "x" * 2_000_000}).encode()], "line 1: the job has 2000013 bytes"),
        ([b" " * 9_000_000 + b"{}"], "line 1: it has 9000002 bytes"),
    ],
)
def test_a_bad_line_is_named(lines: list[bytes], words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_jobs(lines)
    assert words in raised.value.message
