"""The log of ended requests: what a line has, and what happens to its file."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.frontend.ended_requests import MS, TRACE, ended, refused
from support.triton.serving import wait_for
from tidewheel.errors import ConfigError
from tidewheel.frontend import ended_requests
from tidewheel.frontend.ended_requests import EventQueue, RequestLog, wall_offset_ns


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_times_counts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path), "demo")
    log.write([ended(), refused("q", 1, MS + 1, priority=None)])
    first, second = lines(path)
    moment = datetime.fromisoformat(first.pop("time"))
    assert abs(moment.timestamp() - (1100 * MS + wall_offset_ns()) * 1e-9) < 1 and moment.tzinfo == UTC
    assert first == {
        "model": "demo", "request_id": "r", "task": "generate", "stream": True, "priority": "HIGH", "tenant": "acme",
        "finish_reason": "stop", "tag": None, "client_cancelled": False, "queue_ms": 10.0, "prefill_ms": 20.0,
        "first_token_ms": 30.0, "decode_ms": 30.0, "total_ms": 100.0, "prompt_tokens": 7, "cached_tokens": 4,
        "output_tokens": 9, "sequences": 1, "responses": 3, "preemptions": None, "deadline_ms": None, "session": True,
        "trace_id": TRACE, "weights": None,
    }  # fmt: skip
    assert (second["tag"], second["finish_reason"], second["priority"]) == ("TW-KV-FULL", None, None)
    assert (second["queue_ms"], second["total_ms"]) == (None, 1.0)
    assert path.stat().st_mode & 0o777 == 0o600
    log.close()


@pytest.mark.parametrize("wrong", ["", "00-short-b7ad6b7169203331-01", "nonsense", f"00-{TRACE[:-1]}-x-y-z"])
def test_a_trace_that_is_none_is_null(tmp_path: Path, wrong: str) -> None:
    log = RequestLog(str(tmp_path / "log"), "demo")
    log.write([ended(traceparent=wrong)])
    assert lines(tmp_path / "log")[0]["trace_id"] is None


def test_ids_stay_inside_their_line(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"), "demo")
    log.write([ended('a\n{"b": "c"}' + 300 * "x")])
    (only,) = lines(tmp_path / "log")
    assert only["request_id"].startswith('a\n{"b"') and len(only["request_id"]) == 256


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_rotated_file_is_opened_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path), "demo")
    log.write([ended("first")])
    if how == "moved":
        path.rename(tmp_path / "log.1")
    else:
        path.unlink()
    log.write([ended("second")])
    assert [line["request_id"] for line in lines(path)] == ["second"]
    log.write([ended("third")])
    path.write_bytes(b"")  # logrotate's copytruncate
    log.write([ended("fourth")])
    assert [line["request_id"] for line in lines(path)] == ["fourth"]


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: a write ends early, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_after_a_full_disk_lines_are_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path), "demo")
    log.write([ended("first")])
    with disk_of(path.stat().st_size + 20):
        with pytest.raises(OSError, match="20 of"):
            log.write([ended("torn")])
        with pytest.raises(OSError):
            log.write([ended("lost")])
    log.write([ended("second")])
    log.write([ended("third")])
    first, torn, *others = path.read_text().splitlines()
    assert (json.loads(first)["request_id"], len(torn)) == ("first", 20)
    assert [json.loads(line)["request_id"] for line in others] == ["second", "third"]


def test_a_file_that_cannot_be_written_stops_the_load(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("missing/log", "pipe", "link", ""):
        with pytest.raises(ConfigError, match=r"request_log is .* cannot be written"):
            RequestLog(str(tmp_path / name), "demo")


def test_the_error_output_may_take_the_lines(capfd: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("stderr", "demo")
    log.write([ended()])
    log.close()
    assert json.loads(capfd.readouterr().err)["request_id"] == "r"


# --- the queue ----------------------------------------------------------------------------------------------------


def test_all_that_was_put_is_passed_on_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_requests, "FLUSH_S", 60.0)
    taken: list[int] = []
    queue = EventQueue("log", taken.extend)
    for number in range(100):
        queue.put(number)
    queue.close()
    assert taken == list(range(100)) and queue.num_lost == 0


def test_a_slow_consumer_loses_events_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_requests, "MAX_EVENTS", 10)
    monkeypatch.setattr(ended_requests, "FLUSH_S", 0.001)
    may_go_on, is_busy = threading.Event(), threading.Event()
    taken: list[int] = []

    def consume(events: list[int]) -> None:
        is_busy.set()
        assert may_go_on.wait(60)
        taken.extend(events)

    queue = EventQueue("request_log", consume)
    queue.put(-1)
    assert is_busy.wait(60)
    for number in range(25):
        queue.put(number)
    assert queue.num_lost == 15
    may_go_on.set()
    queue.close()
    assert taken == [-1, *range(10)]
    assert "request_log: 15 were lost (more than 10 wait)" in caplog.text


def test_a_consumer_that_fails_is_told_of_seldom_and_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_requests, "_WARN_S", 1000.0)
    monkeypatch.setattr(ended_requests, "FLUSH_S", 0.001)
    calls: list[list[int]] = []

    def consume(events: list[int]) -> None:
        calls.append(events)
        if len(calls) < 4:
            raise OSError("No space left on device")

    queue = EventQueue("request_log", consume)
    for number in range(4):
        queue.put(number)
        wait_for(lambda number=number: len(calls) > number, 60, "the next flush")
    assert len(caplog.records) <= 1
    queue.close()
    assert calls == [[0], [1], [2], [3]] and queue.num_lost == 3
    assert "No space left on device" in caplog.text
