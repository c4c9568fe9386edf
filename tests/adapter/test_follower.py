"""A front end and the engines that serve its model: which one it uses after loads, deaths and failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine.targets import new_target
from tidewheel.adapter import triton_model as module
from tidewheel.adapter.triton_model import Follower
from tidewheel.config import EngineConfig
from tidewheel.engine import launcher
from tidewheel.engine.folder import (
    CURRENT,
    EngineTarget,
    Status,
    make_current,
    read_status,
    write_status,
)
from tidewheel.engine.launcher import choose_engine
from tidewheel.errors import ConfigError, Draining
from tidewheel_process.child import start_ticks
from tidewheel_process.locked_folder import LOCK, try_lock, unlock

LIMIT_S = 60.0
FRONTEND = SimpleNamespace(request_log="", otlp_traces_endpoint="")
SETTINGS = SimpleNamespace(frontend=FRONTEND, entry=None, labels=lambda _: {"model_name": "demo"})


class FakeEngineFrontend:
    """A front end that a test makes fail, and whose engine never comes where a test says so."""

    made: list[FakeEngineFrontend]
    failures: list[BaseException]  # of the next ones
    hangs = False
    num_hanging = 0

    def __init__(
        self, settings: object, target: EngineTarget, name: str, must_stop: Callable[[], bool], on_ended: object
    ) -> None:
        if self.failures:
            raise self.failures.pop(0)
        while self.hangs:
            FakeEngineFrontend.num_hanging += 1
            time.sleep(0.001)
            if must_stop():
                raise Draining("closed")
        self.target, self.num_closed = target, 0
        self.client = SimpleNamespace(has_failed=False)
        self.frontend = SimpleNamespace(is_idle=True)
        self.made.append(self)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EngineFrontend", FakeEngineFrontend)
    monkeypatch.setattr(module, "FOLLOW_S", 0.001)
    monkeypatch.setattr(FakeEngineFrontend, "made", [], raising=False)
    monkeypatch.setattr(FakeEngineFrontend, "failures", [], raising=False)


@pytest.fixture
def target(tmp_path: Path) -> EngineTarget:
    return make_target(tmp_path, "one")


def make_target(model_dir: Path, identity: str, **settings: Any) -> EngineTarget:
    folder = model_dir / identity
    folder.mkdir(exist_ok=True)
    return new_target(folder, EngineConfig(model="m", **settings), identity)


def write(target: EngineTarget, **fields: Any) -> None:
    ticks = start_ticks(os.getpid())
    values = {"state": "ready", "settings": target.config.to_settings(), "read_ns": target.read_ns}
    values |= {"started": target.started.to_settings(), "identity": target.identity, **fields}
    write_status(target.folder, Status(pid=os.getpid(), start_ticks=ticks or 0, **values))


@pytest.fixture
def follower(target: EngineTarget) -> Iterator[Follower]:
    write(target)
    make_current(target)
    started = Follower(target.folder.parent, SETTINGS, target, "test")  # type: ignore[arg-type]
    yield started
    started.close()
    assert [serving.num_closed for serving in FakeEngineFrontend.made] == [1] * len(FakeEngineFrontend.made)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def let_turn(follower: Follower) -> None:
    """Wait until the follower has looked again, at least once."""
    looks, look = [0], follower._next_target

    def count() -> EngineTarget | None:
        looks[0] += 1
        return look()

    follower._next_target = count  # type: ignore[method-assign]
    wait_for(lambda: looks[0] > 1)


def test_it_follows_to_another_engine(follower: Follower, target: EngineTarget) -> None:
    other = make_target(target.folder.parent, "two")
    write(other)
    make_current(other)
    wait_for(lambda: follower.serving.target.folder == other.folder)
    wait_for(lambda: FakeEngineFrontend.made[0].num_closed)


def test_a_front_end_that_has_given_up_joins_the_engine_of_a_later_load(follower: Follower) -> None:
    FakeEngineFrontend.made[0].client.has_failed = True
    wait_for(lambda: len(FakeEngineFrontend.made) == 2)
    assert follower.serving is FakeEngineFrontend.made[1]


@pytest.mark.parametrize(
    ("fields", "starts"),
    [({"is_draining": True}, False), ({"is_given_up": True}, False), ({}, True)],
    ids=["the server shuts down", "crash loop", "room was needed"],
)
def test_a_front_end_that_has_given_up_starts_its_engine_where_it_may(
    follower: Follower, target: EngineTarget, fields: dict[str, bool], starts: bool
) -> None:
    write(target, state="stopped", **fields)
    FakeEngineFrontend.made[0].client.has_failed = True
    if starts:
        wait_for(lambda: len(FakeEngineFrontend.made) == 2)
        assert follower.serving.target.folder == target.folder
    else:
        let_turn(follower)
        assert len(FakeEngineFrontend.made) == 1


def test_an_engine_that_fails_while_it_is_looked_for_counts_as_failed(
    follower: Follower, target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = module.find_engine

    def fail_meanwhile(model_dir: Path) -> EngineTarget | None:
        found = find(model_dir)
        write(target, state="stopped", is_given_up=True)
        FakeEngineFrontend.made[0].client.has_failed = True
        return found

    monkeypatch.setattr(module, "find_engine", fail_meanwhile)
    wait_for(lambda: FakeEngineFrontend.made[0].client.has_failed)
    monkeypatch.setattr(module, "find_engine", find)
    let_turn(follower)
    assert len(FakeEngineFrontend.made) == 1


def test_an_engine_that_has_just_started_again_changes_no_settings(follower: Follower, target: EngineTarget) -> None:
    """It has those of its first start until a front end brings the later ones."""
    write(target._replace(config=EngineConfig(model="m", ageing_s=3.0)), read_ns=0)
    let_turn(follower)
    assert len(FakeEngineFrontend.made) == 1


@pytest.mark.parametrize("error", [ConfigError("no"), OSError("no"), RuntimeError("can't start new thread")])
def test_no_error_ends_the_thread(follower: Follower, target: EngineTarget, error: Exception) -> None:
    FakeEngineFrontend.failures.append(error)
    other = make_target(target.folder.parent, "two")
    write(other)
    make_current(other)
    wait_for(lambda: follower.serving.target.folder == other.folder)
    assert not FakeEngineFrontend.failures


def test_closing_waits_for_no_engine(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngineFrontend, "hangs", True)
    FakeEngineFrontend.made[0].client.has_failed = True
    wait_for(lambda: FakeEngineFrontend.num_hanging)
    follower.close()
    FakeEngineFrontend.made[0].num_closed = 0  # the fixture closes again


def test_a_load_that_fails_gives_back_the_engine_that_made_room(tmp_path: Path, target: EngineTarget) -> None:
    write(target, state="stopped", is_draining=True)
    make_current(target)
    FakeEngineFrontend.failures.append(ConfigError("too large"))
    other = make_target(tmp_path, "two")
    with pytest.raises(ConfigError, match="too large"):
        Follower(tmp_path, SETTINGS, other, "test")  # type: ignore[arg-type]
    status = read_status(tmp_path / CURRENT)
    assert status is not None and not status.is_draining and status.identity == "one"


def test_a_load_removes_the_folders_of_engines_that_have_ended(tmp_path: Path, target: EngineTarget) -> None:
    write(target)
    for name, fields in (("ended", {"state": "stopped"}), ("owned", {"state": "stopped"}), ("alive", {})):
        write(make_target(tmp_path, name), **fields)
    (tmp_path / "empty").mkdir()
    lock = try_lock(tmp_path / "owned" / LOCK)
    assert lock is not None
    started = Follower(tmp_path, SETTINGS, target, "test")  # type: ignore[arg-type]
    started.close()
    unlock(lock)
    assert {path.name for path in tmp_path.iterdir()} == {CURRENT, "one", "owned", "alive"}


def test_what_cannot_be_written_after_the_start_closes_the_front_end(
    tmp_path: Path, target: EngineTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: EngineTarget) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "make_current", fail)
    with pytest.raises(OSError, match="No space"):
        Follower(tmp_path, SETTINGS, target, "test")  # type: ignore[arg-type]
    assert [serving.num_closed for serving in FakeEngineFrontend.made] == [1]


def test_a_status_of_another_version_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_fits_beside", lambda status, config: True)
    old = make_target(tmp_path, "old")
    write(old, started={"model": "m", "setting_of_tomorrow": 1})
    make_current(old)
    target = choose_engine(tmp_path, EngineConfig(model="m"))
    assert target.folder != old.folder
