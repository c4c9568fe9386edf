"""Children: start, readiness, end, restarts, and the guard that cleans up after their parent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidewheel_process import current_process
from tidewheel_process.child import (
    Child,
    CrashLoop,
    DeathCount,
    RestartedChild,
    RestartPolicy,
    StartError,
    describe_exit,
    start_ticks,
    wait_until,
)

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
GUARDED = """
import os, sys
from tidewheel_process.child import Guard

with Guard([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ) as guard:
    print(guard.pid, flush=True)
    sys.stdin.read()
"""
CLEAN_UP = """
import sys
from pathlib import Path
from tidewheel_process.child import guard

guard(Path(sys.argv[1]).unlink)
"""


def python(code: str, **options: Any) -> Child:
    return Child([sys.executable, "-c", code], **options)


def test_a_child_has_a_session_and_no_input() -> None:
    child = python("import os, sys; print(os.getsid(0), sys.stdin.read())", stdout=subprocess.PIPE)
    assert child.stdout.read().split() == [str(child.pid).encode()]
    assert child.ends_within(60) and child.has_ended and (child.returncode, child.exit) == (0, "exit code 0")
    child.stdout.close()


def test_a_child_is_asked_to_end_and_then_killed() -> None:
    child = python(STUBBORN, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert child.exit == "no exit code" and not child.ends_within(0.0)
    child.end(0.1)
    assert child.exit == describe_exit(-9) == "signal 9, Killed"
    child.send_signal(signal.SIGTERM)
    child.stdout.close()


def test_readiness_is_waited_for() -> None:
    child = Child(["/bin/sleep", "60"])
    child.wait_ready(lambda: True, 60)
    with pytest.raises(StartError, match=r"^is not ready after 0.1 s$"):
        child.wait_ready(lambda: False, 0.1)
    child.kill()
    with pytest.raises(StartError, match=r"^ended at its start with signal 9, Killed$"):
        child.wait_ready(lambda: True, 60)


def test_a_child_that_ends_with_its_parent() -> None:
    code = "from tidewheel_process.child import Child; print(Child(['/bin/sleep', '60'], ends_with_parent=True).pid)"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert wait_until(lambda: start_ticks(pid) is None, 60)


def test_delays_grow_and_a_crash_loop_ends() -> None:
    deaths = DeathCount(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [deaths.next_delay_s(10, "") for _ in range(3)] == [1, 2, 4]
    with pytest.raises(CrashLoop, match=r"4 deaths within 60 s of service, .* the last: no memory"):
        deaths.next_delay_s(10, "no memory")


def test_old_deaths_are_forgotten_by_time_of_service() -> None:
    deaths = DeathCount(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [deaths.next_delay_s(50, "") for _ in range(5)] == [1, 2, 2, 2, 2]
    deaths.next_delay_s(0, "a load of any length fails")
    with pytest.raises(CrashLoop):
        deaths.next_delay_s(0, "again")


def test_delays_are_bounded() -> None:
    policy = RestartPolicy(first_delay_s=0.25, max_delay_s=30)
    assert [policy.delay_s(count) for count in (0, 1, 2, 7, 8, 2000)] == [0, 0.25, 0.5, 16, 30, 30]


def test_a_child_is_started_again_until_it_dies_too_often() -> None:
    notes: list[str] = []
    policy = RestartPolicy(first_delay_s=0.0, max_deaths=2)
    restarted = RestartedChild("the gateway", lambda: Child(["/bin/sleep", "60"]), notes.append, policy)
    first = restarted.child
    restarted.watch()
    assert restarted.child is first and not notes
    first.kill()
    restarted.watch()
    restarted.watch()
    assert restarted.child.pid != first.pid and not restarted.child.has_ended
    assert notes == [f"the gateway died (process {first.pid}, signal 9, Killed); starting it again"]
    restarted.child.kill()
    with pytest.raises(CrashLoop):
        restarted.watch()


@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_a_guard_cleans_up_however_its_process_ends(tmp_path: Path, number: signal.Signals | None) -> None:
    left = tmp_path / "left"
    left.touch()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    guarded = Child([sys.executable, "-c", GUARDED, CLEAN_UP, str(left)], **pipes)
    os.kill(int(guarded.stdout.readline()), 0)
    assert left.exists()
    if number is None:
        guarded.stdin.close()
        assert guarded.ends_within(60) and guarded.returncode == 0
    else:
        guarded.send_signal(number)
    assert wait_until(lambda: not left.exists(), 60)
    guarded.wait()
    guarded.stdout.close()
    guarded.stdin.close()


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [(128, 4096, 4096), (1024, 1 << 20, current_process.MAX_DESCRIPTORS), (1 << 20, 1 << 20, 1 << 20),
     (128, 128, 128), (1024, -1, current_process.MAX_DESCRIPTORS), (-1, -1, current_process.MAX_DESCRIPTORS)],
)  # fmt: skip
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    assert current_process.raise_descriptor_limit() == limit
    assert set_to == ([] if soft == -1 else [(limit, hard)])
