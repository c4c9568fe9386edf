"""Processes below another one, and those that were started with a folder in their environment."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidewheel_process import process_tree

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def make_zombie(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_children_have_a_name_and_a_status(child: subprocess.Popen[bytes]) -> None:
    (found,) = [process for process in process_tree.children(os.getpid()) if process.pid == child.pid]
    assert process_tree.name(found).startswith("python") and process_tree.is_alive(found)
    assert process_tree.arguments(child.pid)[1:] == ["-c", WAITING]
    make_zombie(child)
    assert process_tree.status(found) == psutil.STATUS_ZOMBIE and not process_tree.is_alive(found)
    assert found in process_tree.children(os.getpid())
    child.wait()
    assert process_tree.status(found) == "" and process_tree.arguments(child.pid) == []
    assert process_tree.children(2**22 + 1) == []


def test_descendants_are_all_generations_and_not_the_dead(child: subprocess.Popen[bytes]) -> None:
    grandparent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert grandparent.stdout is not None
    grandchild = int(grandparent.stdout.readline())
    try:
        found = {process.pid for process in process_tree.descendants(os.getpid())}
        assert {child.pid, grandparent.pid, grandchild} <= found
        make_zombie(child)
        assert child.pid not in {process.pid for process in process_tree.descendants(os.getpid())}
    finally:
        os.killpg(grandparent.pid, signal.SIGKILL)
        grandparent.communicate()


def test_processes_of_other_users_may_be_hidden(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_visible(file: object, *arguments: Any, **options: Any) -> Any:
        if str(file) == "/proc/1/stat":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(file))
        return io_open(file, *arguments, **options)  # type: ignore[arg-type]

    io_open = io.open
    monkeypatch.setattr("io.open", open_visible)
    monkeypatch.setattr("builtins.open", open_visible)
    for find in (process_tree.children, process_tree.descendants):
        assert child.pid in {process.pid for process in find(os.getpid())}


def test_processes_of_a_folder_are_ended_whatever_they_ignore(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    willing = "import signal; print(flush=True); signal.pause()"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "IN": str(folder)})
        for code, folder in (
            (willing, tmp_path / "a"),
            (stubborn, tmp_path / "a"),
            (willing, tmp_path / "a" / "below"),
            (willing, tmp_path / "ab"),
        )
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        process_tree.end_all(lambda: process_tree.started_with("IN", str(tmp_path / "a")), 1.0)
        assert [process.wait(60) for process in started[:3]] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
        assert started[3].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_reap_leaves_the_one_to_keep(child: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen(["/bin/true"])
    for one in (child, other):
        make_zombie(one)
    process_tree.reap(keep=[child.pid])
    left = {process.pid for process in process_tree.children(os.getpid())}
    assert child.pid in left and other.pid not in left
    assert child.wait() == -signal.SIGKILL
    other.wait()
