"""A front end and the engines that serve its model: which one it uses after loads, deaths and failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewheel.adapter import follower as module
from tidewheel.adapter import triton_model
from tidewheel.adapter.follower import Follower
from tidewheel.config import EngineConfig
from tidewheel.engine import placement
from tidewheel.engine.folder import CURRENT, LOCK, Place, Status, new_place, read_status, write_status
from tidewheel.engine.launcher import take_lock
from tidewheel.engine.placement import choose_place, make_current
from tidewheel.engine.process_handle import process_start_ticks
from tidewheel.errors import ConfigError, Draining

LIMIT_S = 60.0
FRONTEND = SimpleNamespace(health_host="127.0.0.1", health_port=None, request_log="", otlp_traces_endpoint="")
SETTINGS = SimpleNamespace(frontend=FRONTEND, entry=SimpleNamespace(labels={"model_name": "demo"}))


class FakeServing:
    """A front end that a test makes fail, and whose engine never comes where a test says so."""

    made: list[FakeServing]
    failures: list[BaseException]  # of the next ones
    hangs = False
    num_hanging = 0

    def __init__(
        self, settings: object, place: Place, name: str, must_stop: Callable[[], bool], on_ended: object
    ) -> None:
        if self.failures:
            raise self.failures.pop(0)
        while self.hangs:
            FakeServing.num_hanging += 1
            time.sleep(0.001)
            if must_stop():
                raise Draining("closed")
        self.place, self.has_failed, self.num_closed = place, False, 0
        self.frontend = SimpleNamespace(is_idle=True)
        self.made.append(self)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Serving", FakeServing)
    monkeypatch.setattr(module, "FOLLOW_S", 0.001)
    monkeypatch.setattr(FakeServing, "made", [], raising=False)
    monkeypatch.setattr(FakeServing, "failures", [], raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, "one")


def make_place(model_dir: Path, identity: str, **settings: Any) -> Place:
    folder = model_dir / identity
    folder.mkdir(exist_ok=True)
    return new_place(folder, EngineConfig(model="m", **settings), identity)


def write(place: Place, **fields: Any) -> None:
    ticks = process_start_ticks(os.getpid())
    values = {"state": "ready", "settings": place.config.to_settings(), "read_ns": place.read_ns}
    values |= {"started": place.started.to_settings(), "identity": place.identity, **fields}
    write_status(place.folder, Status(pid=os.getpid(), start_ticks=ticks or 0, **values))


@pytest.fixture
def follower(place: Place) -> Iterator[Follower]:
    write(place)
    make_current(place)
    started = Follower(place.folder.parent, SETTINGS, place, "test")  # type: ignore[arg-type]
    yield started
    started.close()
    assert [serving.num_closed for serving in FakeServing.made] == [1] * len(FakeServing.made)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def let_turn(follower: Follower) -> None:
    """Wait until the follower has looked again, at least once."""
    looks, look = [0], follower._next_place

    def count() -> Place | None:
        looks[0] += 1
        return look()

    follower._next_place = count  # type: ignore[method-assign]
    wait_for(lambda: looks[0] > 1)


def test_it_follows_to_another_engine(follower: Follower, place: Place) -> None:
    other = make_place(place.folder.parent, "two")
    write(other)
    make_current(other)
    wait_for(lambda: follower.serving.place.folder == other.folder)
    wait_for(lambda: FakeServing.made[0].num_closed)


def test_a_front_end_that_has_given_up_joins_the_engine_of_a_later_load(follower: Follower) -> None:
    FakeServing.made[0].has_failed = True
    wait_for(lambda: len(FakeServing.made) == 2)
    assert follower.serving is FakeServing.made[1]


@pytest.mark.parametrize(
    ("fields", "starts"),
    [({"is_draining": True}, False), ({"is_given_up": True}, False), ({}, True)],
    ids=["the server shuts down", "crash loop", "room was needed"],
)
def test_a_front_end_that_has_given_up_starts_its_engine_where_it_may(
    follower: Follower, place: Place, fields: dict[str, bool], starts: bool
) -> None:
    write(place, state="stopped", **fields)
    FakeServing.made[0].has_failed = True
    if starts:
        wait_for(lambda: len(FakeServing.made) == 2)
        assert follower.serving.place.folder == place.folder
    else:
        let_turn(follower)
        assert len(FakeServing.made) == 1


def test_an_engine_that_fails_while_it_is_looked_for_counts_as_failed(
    follower: Follower, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = module.find_place

    def fail_meanwhile(model_dir: Path) -> Place | None:
        found = find(model_dir)
        write(place, state="stopped", is_given_up=True)
        FakeServing.made[0].has_failed = True
        return found

    monkeypatch.setattr(module, "find_place", fail_meanwhile)
    wait_for(lambda: FakeServing.made[0].has_failed)
    monkeypatch.setattr(module, "find_place", find)
    let_turn(follower)
    assert len(FakeServing.made) == 1


def test_an_engine_that_has_just_started_again_changes_no_settings(follower: Follower, place: Place) -> None:
    """It has those of its first start until a front end brings the later ones."""
    write(place._replace(config=EngineConfig(model="m", ageing_s=3.0)), read_ns=0)
    let_turn(follower)
    assert len(FakeServing.made) == 1


@pytest.mark.parametrize("error", [ConfigError("no"), OSError("no"), RuntimeError("can't start new thread")])
def test_no_error_ends_the_thread(follower: Follower, place: Place, error: Exception) -> None:
    FakeServing.failures.append(error)
    other = make_place(place.folder.parent, "two")
    write(other)
    make_current(other)
    wait_for(lambda: follower.serving.place.folder == other.folder)
    assert not FakeServing.failures


def test_closing_waits_for_no_engine(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServing, "hangs", True)
    FakeServing.made[0].has_failed = True
    wait_for(lambda: FakeServing.num_hanging)
    follower.close()
    FakeServing.made[0].num_closed = 0  # the fixture closes again


def test_a_load_that_fails_gives_back_the_engine_that_made_room(tmp_path: Path, place: Place) -> None:
    write(place, state="stopped", is_draining=True)
    make_current(place)
    FakeServing.failures.append(ConfigError("too large"))
    other = make_place(tmp_path, "two")
    with pytest.raises(ConfigError, match="too large"):
        triton_model._follow(tmp_path, SETTINGS, other, "test")  # type: ignore[arg-type]
    status = read_status(tmp_path / CURRENT)
    assert status is not None and not status.is_draining and status.identity == "one"


def test_a_load_removes_the_folders_of_engines_that_have_ended(tmp_path: Path, place: Place) -> None:
    write(place)
    for name, fields in (("ended", {"state": "stopped"}), ("owned", {"state": "stopped"}), ("alive", {})):
        write(make_place(tmp_path, name), **fields)
    (tmp_path / "empty").mkdir()
    lock = take_lock(tmp_path / "owned" / LOCK)
    assert lock is not None
    started = triton_model._follow(tmp_path, SETTINGS, place, "test")  # type: ignore[arg-type]
    started.close()
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {CURRENT, "one", "owned", "alive"}


def test_what_cannot_be_written_after_the_start_closes_the_front_end(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: Place) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton_model, "make_current", fail)
    with pytest.raises(OSError, match="No space"):
        triton_model._follow(tmp_path, SETTINGS, place, "test")  # type: ignore[arg-type]
    assert [serving.num_closed for serving in FakeServing.made] == [1]


def test_a_status_of_another_version_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_fits_beside", lambda status, config: True)
    old = make_place(tmp_path, "old")
    write(old, started={"model": "m", "setting_of_tomorrow": 1})
    make_current(old)
    place = choose_place(tmp_path, EngineConfig(model="m"))
    assert place.folder != old.folder
