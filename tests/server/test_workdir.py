"""The work folder: private, gone afterwards, and never taken from a server that lives."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidewheel.errors import ConfigError
from tidewheel.server import workdir
from tidewheel.server.workdir import remove_environments, remove_shared_memory, shared_bytes, sweep, work_dir

HOLD_WORK_DIR = """
import signal, sys
from pathlib import Path
from tidewheel.server.workdir import work_dir

parent, shared_memory = map(Path, sys.argv[1:])
with work_dir(parent, shared_memory) as work:
    (shared_memory / f"{work.shm_prefix}region").touch()
    print(flush=True)
    signal.pause()
"""


@pytest.fixture
def shared_memory(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def make_old(folder: Path) -> None:
    os.utime(folder, (1, 1))


def test_private_and_gone_with_its_shared_memory(tmp_path: Path, shared_memory: Path) -> None:
    with work_dir(tmp_path, shared_memory) as work:
        assert stat.S_IMODE(work.root.stat().st_mode) == 0o700
        assert stat.S_IMODE(work.run.stat().st_mode) == 0o700
        (shared_memory / f"{work.shm_prefix}region").touch()
        (shared_memory / "somebody_elses").touch()
        (work.run / "engine").mkdir()
    assert not work.root.exists()
    assert [path.name for path in shared_memory.iterdir()] == ["somebody_elses"]


def test_run_dir_of_the_environment(tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the parent before, the run folder within, and itself again after."""
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "made"))
    (tmp_path / "made").mkdir(mode=0o755)
    with work_dir(shared_memory=shared_memory) as work:
        assert work.root.parent == tmp_path / "made"
        assert stat.S_IMODE(work.root.stat().st_mode) == 0o700
        assert os.environ["TIDEWHEEL_RUN_DIR"] == str(work.run)
    assert os.environ["TIDEWHEEL_RUN_DIR"] == str(tmp_path / "made")


def test_gone_after_an_error(tmp_path: Path, shared_memory: Path) -> None:
    with pytest.raises(RuntimeError), work_dir(tmp_path, shared_memory) as work:
        raise RuntimeError
    assert not work.root.exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, shared_memory: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"file cannot be written \(File exists\): make room, or set TIDE"),
        work_dir(tmp_path / "file", shared_memory),
    ):
        pass


def test_two_servers_have_different_prefixes(tmp_path: Path, shared_memory: Path) -> None:
    with work_dir(tmp_path, shared_memory) as one, work_dir(tmp_path, shared_memory) as two:
        assert not one.shm_prefix.startswith(two.shm_prefix)
        assert not two.shm_prefix.startswith(one.shm_prefix)


def test_leftovers_of_a_killed_server_are_removed(tmp_path: Path, shared_memory: Path) -> None:
    left_over = tmp_path / "serve-deadbeef"
    left_over.mkdir()
    (left_over / "lock").touch()
    without_lock = tmp_path / "serve-old"
    without_lock.mkdir()
    make_old(without_lock)
    (shared_memory / "tidewheel_deadbeef_region").touch()
    with work_dir(tmp_path, shared_memory):
        assert not left_over.exists()
        assert not without_lock.exists()
    assert list(shared_memory.iterdir()) == []


def test_shared_memory_of_a_killed_server_is_removed_wherever_its_folder_was(
    tmp_path: Path, shared_memory: Path
) -> None:
    """One was killed, and its folder is gone or in another place. Another lives."""
    killed = subprocess.Popen(
        [sys.executable, "-c", HOLD_WORK_DIR, str(tmp_path / "first"), str(shared_memory)], stdout=subprocess.PIPE
    )
    assert killed.stdout is not None
    killed.stdout.readline()
    with work_dir(tmp_path / "second", shared_memory) as living:
        region = shared_memory / f"{living.shm_prefix}region"
        region.touch()
        (shared_memory / "tidewheel_without_a_marker").touch()
        (shared_memory / "tidewheel_link_owner").symlink_to(region)
        before = set(shared_memory.iterdir())
        remove_shared_memory(living.shm_prefix, shared_memory)  # as for another tritonserver
        region.touch()
        with work_dir(tmp_path / "third", shared_memory):
            assert before < set(shared_memory.iterdir()), "both live"
        killed.kill()
        killed.wait()
        killed.stdout.close()
        with work_dir(tmp_path / "fourth", shared_memory) as last:
            left = {path.name for path in shared_memory.iterdir()}
        owners = {f"{work.shm_prefix}owner" for work in (living, last)}
        assert left == {*owners, region.name, "tidewheel_without_a_marker", "tidewheel_link_owner"}


def test_folders_that_a_killed_triton_left_are_removed_unless_one_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python_env_old", "python_env_full", "python_env_empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "python_env_full" / "0").mkdir()
    make_old(tmp_path / "python_env_old")
    living = ["tritonserver"]
    monkeypatch.setattr(workdir.process_tree, "is_running", living.__contains__)
    remove_environments(1000.0, tmp_path)
    assert (tmp_path / "python_env_empty").exists()
    living.clear()
    remove_environments(1000.0, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"python_env_old", "python_env_full", "other"}


def test_what_may_be_in_use_stays(tmp_path: Path, shared_memory: Path) -> None:
    being_made = tmp_path / "serve-new"
    being_made.mkdir()
    link = tmp_path / "serve-link"
    link.symlink_to(shared_memory)
    with work_dir(tmp_path, shared_memory) as running:
        make_old(running.root)
        assert sweep(tmp_path, shared_memory) == []
        assert running.root.exists()
        assert being_made.exists()
        assert link.exists()


def test_processes_of_a_killed_server_are_ended(tmp_path: Path, shared_memory: Path) -> None:
    """One obeys SIGTERM, one ignores it, one is of a server below the killed one, and one is of another server."""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    willing = "import signal; print(flush=True); signal.pause()"
    root = tmp_path / "serve-dead"
    root.mkdir()
    (root / "lock").touch()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "TIDEWHEEL_RUN_DIR": str(tmp_path / name / "run")},
        )
        for code, name in (
            (willing, root.name),
            (stubborn, root.name),
            (willing, f"{root.name}/run/serve-below"),
            (willing, "serve-other"),
        )
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        assert sweep(tmp_path, shared_memory) == [root]
        assert [process.wait(60) for process in started[:3]] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
        assert started[3].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_the_memory_of_a_region_is_that_of_the_process_which_names_it(shared_memory: Path) -> None:
    for name in ("tidewheel_one_r", "tidewheel_one_s"):
        (shared_memory / name).write_bytes(b"x" * 8192)
    command = ["/bin/sh", "-c", "echo; read line", "tidewheel_one_r", "tidewheel_gone"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun, with its own arguments
            assert shared_bytes(process.pid, "tidewheel_", shared_memory) == 8192
            assert shared_bytes(process.pid, "other_", shared_memory) == 0
        finally:
            process.kill()
    assert shared_bytes(process.pid, "tidewheel_", shared_memory) == 0
