"""Handles of processes that need not be children."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tidewheel_process.child import ProcessHandle, start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_start_of_a_process(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert started is not None and started >= (start_ticks(os.getpid()) or 0) > 0
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) is None
    assert start_ticks(child.pid, or_zombie=True) == started
    child.wait()
    assert start_ticks(child.pid, or_zombie=True) is None


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_the_end_is_seen(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, with_pidfd: bool) -> None:
    if not with_pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    handle = ProcessHandle(child.pid)
    assert (handle.fileno is not None) == with_pidfd
    assert handle.is_alive and not handle.has_ended and not handle.wait(0.0)
    handle.end(signal.SIGTERM, 60.0)
    assert handle.has_ended and handle.wait(0.0)
    if handle.fileno is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(handle.fileno, selectors.EVENT_READ)
            assert selector.select(timeout=60)
    handle.close()
    assert child.wait() == -signal.SIGTERM


def test_a_later_process_with_the_same_pid_is_another_one(child: subprocess.Popen[bytes]) -> None:
    handle = ProcessHandle(child.pid, (start_ticks(child.pid) or 0) - 1)
    assert handle.has_ended and handle.fileno is None
    handle.send_signal(signal.SIGKILL)
    assert child.poll() is None


def no_pidfd(pid: int) -> int:
    raise OSError("not implemented")
