"""`tidewheel enqueue`, `worker` and `results`, with a Triton without models in this process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import support.durable.needed  # noqa: F401
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response, running
from tidewheel.cli import main as cli
from tidewheel_queue import Queue

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def place(redis_folder: Path, name: str) -> list[str]:
    return ["--dir", str(redis_folder), "--queue", name]


def run(*arguments: str) -> int:
    return cli.main(arguments)


def lines(captured: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in captured.readouterr().out.splitlines()]


def work(place: list[str], triton: FakeTriton, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tidewheel.cli.main", "worker", *place, "--url", f"127.0.0.1:{triton.port}"]
    return subprocess.Popen([*command, "--model", "demo", *arguments], stderr=subprocess.PIPE, text=True)


def test_a_file_of_jobs_becomes_results(
    place: list[str], triton: FakeTriton, tmp_path: Path, capsys: Captured
) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(
        '{"id": "a", "prompt": "one two", "params": {"seed": 3}, "tenant": "acme"}\n\n{"prompt": "three"}\n'
    )
    assert run("enqueue", *place, "--file", str(jobs)) == 0
    ids = capsys.readouterr().out.split()
    assert ids[0] == "a"
    assert run("enqueue", *place, "--file", str(jobs)) == 0
    assert capsys.readouterr().err == "added 0 jobs; the queue knew 2\n"
    worker = work(place, triton, "--until-empty")
    _, told = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert told.splitlines()[-1] == "tidewheel worker: 2 done, 0 failed, 0 given up or lost, 0 given back"
    assert run("results", *place, *ids) == 0
    first, second = lines(capsys)
    assert (first["id"], first["state"], first["text"], first["attempts"]) == ("a", "done", "one two", 1)
    assert second["text"] == "three"
    sampling = next(asked.sampling for asked in triton.asked if asked.inputs["text_input"] == "one two")
    assert (sampling["seed"], sampling["tenant"]) == (3, "acme")


def test_one_job(place: list[str], capsys: Captured) -> None:
    assert run("enqueue", *place, "hello", "--id", "x", "--priority", "low", "--max-tokens", "3", "--stream") == 0
    assert capsys.readouterr() == ("x\n", "")
    assert run("results", *place, "x") == 0
    assert lines(capsys) == [{"id": "x", "state": "waiting", "attempts": 0}]
    assert run("results", *place, "--counts") == 0
    (counts,) = lines(capsys)
    assert counts["waiting"] == {"CRITICAL": 0, "HIGH": 0, "NORMAL": 0, "LOW": 1}
    assert run("results", *place, "--cancel", "x") == 0
    assert lines(capsys) == [{"id": "x", "cancelled": True}]
    assert run("results", *place) == 0
    assert lines(capsys) == [{"id": "x", "state": "cancelled", "attempts": 0}]
    assert run("results", *place, "--tokens", "x") == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "jobs.jsonl: line 2: this is no JSON"),
        ('{"promt": "x"}', "jobs.jsonl: line 2: unknown field 'promt': did you mean 'prompt'?"),
        ('{"prompt": "x", "id": "a/b"}', "jobs.jsonl: line 2: id 'a/b'"),
        ('{"prompt": "' + "x" * 2_000_000 + '"}', "jobs.jsonl: line 2: the job has 2000013 bytes; at most 1048576"),
    ],
)
def test_a_bad_line_adds_nothing(
    queue: Queue, place: list[str], tmp_path: Path, capsys: Captured, line: str, words: str
) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(f'{{"prompt": "good"}}\n{line}\n')
    assert run("enqueue", *place, "--file", str(jobs)) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.endswith("; nothing was added\n")
    assert told.count("\n") == 1
    assert sum(queue.counts().waiting) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("enqueue",), "give a prompt, or --file"),
        (("enqueue", "x", "--file", "y"), "give a prompt, or --file"),
        (("enqueue", "--file", "y", "--priority", "1"), "options of a job go with a prompt"),
        (("enqueue", "--file", "y", "--temperature", "1"), "options of a job go with a prompt"),
        (("enqueue", "--file", "/no/such/file"), "/no/such/file cannot be read (No such file or directory)"),
        (("enqueue", "x", "--priority", "9"), "priority is 9"),
        (("enqueue", "x", "--priority", "best"), "priority is 'best'"),
        (("enqueue", "x", "--bound", "0"), "bound is 0"),
        (("worker", "--model", "m", "--concurrency", "0"), "concurrency is 0"),
        (("worker", "--url", "127.0.0.1:1"), "no server answers at 127.0.0.1:1"),
        (("results", "--tokens"), "--tokens takes the id of one job"),
        (("results", "--cancel"), "--cancel takes the ids of jobs"),
        (("results", "--counts", "--wait-s", "3"), "--wait-s waits for the jobs that are named"),
        (("results", "--dead", "x"), "leave the ids away"),
        (("results", "x", "--wait-s", "-1"), "--wait-s is -1"),
        (("results", "unknown"), "has no job 'unknown'"),
        (("results", "a b"), "id 'a b': 1 to 128 characters"),
    ],
)
def test_wrong_usage(place: list[str], capsys: Captured, arguments: tuple[str, ...], words: str) -> None:
    assert run(*arguments, *place) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_an_unreachable_redis(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_QUEUE_REDIS", "redis://me:secret@127.0.0.1:1")
    for arguments in (["enqueue", "x"], ["worker", "--model", "m"], ["results"]):
        assert run(*arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith("tidewheel: error: no Redis answers at redis://127.0.0.1:1 (")
        assert "secret" not in told
        assert told.count("\n") == 1
        with pytest.raises(SystemExit):
            run(arguments[0], "--help")
        assert "secret" not in capsys.readouterr().out


def test_the_bound(place: list[str], tmp_path: Path, capsys: Captured) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "x"}\n' * 700)
    assert run("enqueue", *place, "--file", str(jobs), "--bound", "600") == 2
    told = capsys.readouterr().err
    assert "holds 500 jobs that wait or run, and 200 more would pass its bound of 600" in told
    assert "of 700 jobs 500 are in the queue: the same command, or one with --wait, adds the others" in told
    assert run("enqueue", *place, "--file", str(jobs)) == 0
    assert capsys.readouterr().err == "added 200 jobs; the queue knew 500\n"


@pytest.mark.parametrize("num_signals", [1, 2])
def test_signals(queue: Queue, place: list[str], triton: FakeTriton, num_signals: int) -> None:
    asked, free = threading.Event(), threading.Event()

    def answer(request: Asked) -> Answer:
        asked.set()
        free.wait(60)
        yield response(request.message, text_output="late", finish_reason="stop")

    triton.answer = answer
    queue.enqueue(id="a", prompt="x")
    worker = work(place, triton, "--drain-s", "3600")
    assert worker.stderr is not None
    assert asked.wait(60)
    worker.send_signal(signal.SIGTERM)
    assert any("finishing 1 jobs" in line for line in worker.stderr)
    if num_signals == 1:
        free.set()
        assert worker.wait(60) == 0
        assert queue.result("a").text == "late"
    else:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 130
        free.set()
        assert queue.result("a").state == "running"
    worker.stderr.close()


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['redis'] = None; from tidewheel.cli.main import main; exit(main(['enqueue', 'x']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr == "tidewheel: error: a queue needs the package redis: pip install 'tidewheel[queue]'\n"
