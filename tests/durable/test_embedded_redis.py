"""The Redis of a folder: private, shared by processes, there while one uses it, and back after any kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import support.durable.needed  # noqa: F401
from support.durable.processes import kill_redis, redis_of
from support.triton.serving import wait_for
from tidewheel_client import RequestError
from tidewheel_process import locked_folder
from tidewheel_queue import Queue
from tidewheel_queue.redis_endpoint import EmbeddedRedis

HOLD = """
import sys
from tidewheel_queue import Queue
queue = Queue(sys.argv[1])
print(queue.enqueue(prompt="x").id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(short_path: Path) -> Path:
    return short_path / "queue"


def user(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process


def test_it_ends_after_its_last_user_however_that_ends(folder: Path) -> None:
    users = [user(folder) for _ in range(3)]  # started at once
    ids = {str(process.stdout.readline()).strip() for process in users if process.stdout}
    redis = redis_of(folder)
    assert redis is not None
    for process in users[:2]:
        process.kill()
        process.communicate()
    with Queue(folder) as queue:
        assert {queue.result(job_id).state for job_id in ids} == {"waiting"}
        users[2].kill()
        users[2].communicate()
        assert redis_of(folder) == redis  # the same one for all
        guard = redis.parent()
    assert guard is not None
    wait_for(lambda: not redis.is_running() and not guard.is_running(), 60, "the end of Redis and its guard")
    with Queue(folder) as queue:
        assert sum(queue.counts().waiting) == 3


@pytest.mark.parametrize("guard", [False, True], ids=["redis", "redis and its guard"])
def test_a_killed_redis_comes_back_with_all_that_it_said_to_have(folder: Path, guard: bool) -> None:
    with Queue(folder) as queue:
        for number in range(3):
            ids = [queue.enqueue(prompt="x").id for _ in range(50)]
            kill_redis(folder, guard=guard)
            assert {queue.result(job_id).state for job_id in ids} == {"waiting"}
            assert sum(queue.counts().waiting) == 50 * (number + 1)


def test_the_guard_starts_a_killed_redis(folder: Path) -> None:
    with Queue(folder):
        first = redis_of(folder)
        assert first is not None
        guard = first.parent()
        first.kill()
        second = wait_for(lambda: (found := redis_of(folder)) and found != first and found, 60, "another Redis")
        assert second.parent() == guard


def test_packages_do_not_shadow_the_standard_library(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the old `pathlib` on PyPI."""
    packages = short_path / "packages"
    packages.mkdir()
    (packages / "pathlib.py").write_text("raise ImportError\n")
    package = Path(locked_folder.__file__).parent
    (packages / package.name).symlink_to(package)
    monkeypatch.setattr(locked_folder, "__file__", str(packages / package.name / "locked_folder.py"))
    with Queue(short_path / "queue") as queue:
        assert queue.result(queue.enqueue(prompt="x").id).state == "waiting"


def test_only_its_user_may_enter(folder: Path) -> None:
    with Queue(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        redis = redis_of(folder)
        assert redis is not None
        assert [one for one in redis.net_connections() if one.family.name != "AF_UNIX"] == []
    folder.chmod(0o755)
    with pytest.raises(RequestError, match="is open to other users: run chmod 700 on it"):
        Queue(folder)


def test_a_folder_may_have_a_long_name(folder: Path) -> None:
    with Queue(folder / ("x" * 100)) as queue:
        assert queue.result(queue.enqueue(prompt="x").id).state == "waiting"


def test_lines_of_redis_conf_are_read(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "redis.conf").write_text("appendfsync everysec\nport 6379\n")
    left = folder / "temp-rewriteaof-bg-1.aof"
    left.touch()
    with Queue(folder) as queue:
        assert not left.exists()
        assert queue._core._redis.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert queue._core._redis.config_get("port") == {"port": "0"}


def test_a_redis_that_does_not_start_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = EmbeddedRedis._spawn

    def spawn_and_see_it_fail(redis: EmbeddedRedis) -> None:
        spawn(redis)
        wait_for(lambda: "no_such_option" in redis._log.read_text(), 60, "what Redis says")

    monkeypatch.setattr(EmbeddedRedis, "_spawn", spawn_and_see_it_fail)
    monkeypatch.setattr("tidewheel_queue.redis_endpoint._START_S", 0.5)
    folder.mkdir(mode=0o700)
    (folder / "redis.conf").write_text("no_such_option 3\n")
    with pytest.raises(RequestError, match=r"does not start: .*\(.*redis\.log\)"):
        EmbeddedRedis(folder)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("x" * 300, r"cannot be made \(File name too long\)"),
        ("file/queue", r"cannot be made \(Not a directory\)"),
        ("link", r"cannot be made \(File exists\)"),
    ],
)
def test_wrong_folders(short_path: Path, path: str, words: str) -> None:
    (short_path / "file").touch()
    (short_path / "link").symlink_to(short_path / "missing")
    with pytest.raises(RequestError, match=words):
        Queue(short_path / path)
    assert not (short_path / "missing").exists()
