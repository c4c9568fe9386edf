"""Processes as /proc shows them."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidewheel.server import processes

WAITING = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_read_and_children(child: subprocess.Popen[bytes]) -> None:
    found = processes.read(child.pid)
    assert found is not None
    assert (found.pid, found.parent) == (child.pid, os.getpid())
    assert found.name.startswith("python")
    assert child.pid in [process.pid for process in processes.children(os.getpid())]
    assert processes.read(2**22 + 1) is None


def test_descendants_are_all_generations_and_not_the_dead(child: subprocess.Popen[bytes]) -> None:
    grandparent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert grandparent.stdout is not None
    grandchild = int(grandparent.stdout.readline())
    try:
        found = {process.pid for process in processes.descendants(os.getpid())}
        assert {child.pid, grandparent.pid, grandchild} <= found
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert child.pid not in {process.pid for process in processes.descendants(os.getpid())}
    finally:
        os.killpg(grandparent.pid, signal.SIGKILL)
        grandparent.communicate()


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_watch(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, with_pidfd: bool) -> None:
    if not with_pidfd:
        monkeypatch.setattr(os, "pidfd_open", _no_pidfd)
    process = processes.read(child.pid)
    assert process is not None
    watch = processes.Watch(process)
    assert (watch.fileno is not None) == with_pidfd
    assert not watch.has_ended()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watch.has_ended()
    if watch.fileno is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(watch.fileno, selectors.EVENT_READ)
            assert selector.select(timeout=60)
    watch.close()


def test_another_process_with_the_same_number_is_not_the_one(child: subprocess.Popen[bytes]) -> None:
    process = processes.read(child.pid)
    assert process is not None
    watch = processes.Watch(process._replace(started=process.started - 1))
    assert watch.has_ended()
    watch.close()


def test_reap_leaves_the_one_to_keep(child: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen(["/bin/true"])
    child.kill()
    for one in (child, other):
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    processes.reap(keep=child.pid)
    assert processes.read(other.pid) is None
    assert processes.read(child.pid) is not None
    assert child.wait() == -signal.SIGKILL
    other.wait()


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [(128, 4096, 4096), (1024, 1 << 20, processes.MAX_DESCRIPTORS), (1 << 20, 1 << 20, 1 << 20), (128, 128, 128),
     (1024, -1, processes.MAX_DESCRIPTORS), (-1, -1, processes.MAX_DESCRIPTORS)],
)  # fmt: skip
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    assert processes.raise_descriptor_limit() == limit
    assert set_to == ([] if soft == -1 else [(limit, hard)])


def _no_pidfd(pid: int) -> int:
    raise OSError("not implemented")
