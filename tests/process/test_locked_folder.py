"""Private folders: their owner, their mode, and the lock that one process holds."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tidewheel_process import locked_folder
from tidewheel_process.locked_folder import (
    LOCK,
    FolderError,
    is_at,
    is_free,
    is_left_over,
    is_locked,
    make_private,
    new_folder,
    try_lock,
    unlock,
)

HOLD = """
import sys
from pathlib import Path
from tidewheel_process.locked_folder import try_lock

lock = try_lock(Path(sys.argv[1]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


def test_a_folder_that_is_open_or_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_private(tmp_path / "a" / "b", "set DIR")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.chmod(0o750)
    with pytest.raises(FolderError, match=r"b is open to other users: run chmod 700 on it, or set DIR$"):
        make_private(made, "set DIR")
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(FolderError, match=r"link must be a folder that belongs to user \d+: set DIR$"):
        make_private(tmp_path / "link", "set DIR")
    monkeypatch.setattr(locked_folder.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(FolderError, match="belongs to user"):
        make_private(made, "set DIR")


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        assert is_locked(tmp_path / LOCK) and try_lock(tmp_path / LOCK) is None
        assert not is_free(tmp_path / LOCK) and not is_left_over(tmp_path)
        holder.kill()
        holder.wait()
        assert is_left_over(tmp_path) and not is_locked(tmp_path / LOCK)
        lock = try_lock(tmp_path / LOCK)
        assert lock is not None and not is_free(tmp_path / LOCK)
        unlock(lock)
        assert is_free(tmp_path / LOCK)


def test_a_lock_file_that_was_made_again_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    first = try_lock(path)
    assert first is not None and is_at(first.fileno(), path) and try_lock(path) is None
    path.unlink()
    second = try_lock(path)
    assert second is not None and is_at(second.fileno(), path) and not is_at(first.fileno(), path)
    unlock(first)
    unlock(second)


@pytest.mark.parametrize("again", ["gone", "made again", "made again and locked"])
def test_a_lock_on_a_folder_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    others: list[Any] = []
    flock = fcntl.flock

    def flock_removed(file: Any, kind: int) -> None:
        flock(file, kind)
        monkeypatch.undo()
        shutil.rmtree(path)
        if again != "gone":
            path.mkdir()
            (path / LOCK).touch()
        if again == "made again and locked":
            others.append(try_lock(path / LOCK))

    monkeypatch.setattr(fcntl, "flock", flock_removed)
    assert try_lock(path / LOCK) is None
    assert [lock is not None for lock in others] == [True] * (again == "made again and locked")
    for lock in others:
        unlock(lock)
    path.mkdir(exist_ok=True)
    assert is_free(path / LOCK)


def test_a_child_does_not_inherit_a_lock(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / LOCK)
    assert lock is not None
    with subprocess.Popen(["/bin/sleep", "60"], close_fds=False) as child:
        unlock(lock)
        assert is_free(tmp_path / LOCK)
        child.kill()


def test_a_lock_of_another_user_and_a_link_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "theirs").touch()
    assert not is_free(tmp_path / "link") and not (tmp_path / "target").exists()
    monkeypatch.setattr(locked_folder.os, "getuid", lambda: os.geteuid() + 1)
    assert not is_free(tmp_path / "theirs") and not is_left_over(tmp_path)


def test_a_pipe_in_place_of_a_lock_delays_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    look = threading.Thread(target=is_free, args=[tmp_path / LOCK], daemon=True)
    look.start()
    look.join(10.0)
    assert not look.is_alive()


def test_a_new_folder_is_held_and_removed(tmp_path: Path) -> None:
    with new_folder(tmp_path, "x-") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert is_locked(folder / LOCK) and not is_left_over(folder)
    assert not folder.exists()


def test_a_look_at_a_new_folder_delays_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[threading.Timer] = []

    def make_and_look(**options: Any) -> str:
        folder = make(**options)
        descriptor = os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        looks.append(threading.Timer(0.2, os.close, [descriptor]))
        looks[0].start()
        return folder

    make = locked_folder.tempfile.mkdtemp
    monkeypatch.setattr(locked_folder.tempfile, "mkdtemp", make_and_look)
    with new_folder(tmp_path, "x-") as folder:
        looks[0].join()
        assert is_locked(folder / LOCK) and not is_left_over(folder)


def test_a_young_folder_without_a_lock_is_in_the_making(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert not is_left_over(tmp_path / "new")
    os.utime(tmp_path / "new", (1, 1))
    assert is_left_over(tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    assert not is_left_over(tmp_path / "new")
