"""The step loop's heartbeat, and who judges it by files alone, on a clock of the test."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from tidewheel.engine.folder import CURRENT, HEARTBEAT, Status, first_status, write_status
from tidewheel.engine.heartbeat import MAX_GAP_S, UNUSED_S, EngineWatch, HangWatch, Heartbeat
from tidewheel_process.locked_folder import LOCK, is_locked

LOOK_S = 0.2
GONE = "the front end of the engine is gone or says nothing"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """A front end that holds the lock, the engine's files, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.folder = folder / "identity"
        self.folder.mkdir()
        (folder / CURRENT).symlink_to(self.folder.name)
        self.status = first_status(os.getpid(), "ready", {}, "identity")
        self.lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.write()
        self.heartbeat = Heartbeat(self.folder)
        self.heartbeat.beat(None, 1)

    def write(self, **changes: object) -> Status:
        self.status = msgspec.structs.replace(self.status, **changes)
        write_status(self.folder, self.status)
        return self.status

    def leave(self) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def hang_watch(self) -> HangWatch:
        return HangWatch(self.folder, self.clock)

    def engine_watch(self) -> EngineWatch:
        return EngineWatch(self.folder.parent / CURRENT, clock=self.clock)

    def wait(self, watch: HangWatch | EngineWatch, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.clock.now += LOOK_S
            watch.look()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize(
    ("expected_s", "hung_s", "end_s"), [(None, 5, 30), (0.02, 5, 30), (1.2, 12, 30), (3, 30, 60)]
)
def test_a_hang_is_longer_than_any_step(world: World, expected_s: float | None, hung_s: int, end_s: int) -> None:
    watch = world.hang_watch()
    world.heartbeat.beat(expected_s, 1)
    watch.look()
    world.wait(watch, hung_s - 0.4)
    assert not watch.is_hung
    world.wait(watch, 0.6)
    assert watch.is_hung
    assert ("in a step" in watch.describe()) == (expected_s is not None)
    world.wait(watch, end_s - hung_s - 0.8)
    assert not watch.must_end
    world.wait(watch, 0.8)
    assert watch.must_end
    world.heartbeat.beat(expected_s, 1)
    watch.look()
    assert not watch.is_hung
    assert watch.silence_s == 0


def test_a_loop_that_turns_never_hangs(world: World) -> None:
    watch = world.hang_watch()
    for _ in range(100):
        world.heartbeat.beat(0.0, 1)
        world.wait(watch, 4.0)
        assert not watch.is_hung


def test_a_pause_of_the_watcher_or_of_the_machine_is_no_silence(world: World) -> None:
    watch = world.hang_watch()
    for _ in range(3):
        world.clock.now += 3600
        watch.look()
    assert watch.silence_s == 3 * MAX_GAP_S
    assert not watch.is_hung


def test_an_engine_that_compiles_is_waited_for(world: World) -> None:
    watch = world.hang_watch()
    world.heartbeat.beat(0.01, 1)
    world.write(stage="compile")
    world.wait(watch, 120)
    assert not watch.is_hung
    world.write(stage="")
    world.wait(watch, 6)
    assert watch.is_hung


def test_without_a_heartbeat_nothing_hangs(world: World) -> None:
    (world.folder / HEARTBEAT).unlink()
    watch = world.hang_watch()
    world.wait(watch, 100)
    assert not watch.is_hung
    assert not watch.must_end


def test_the_heartbeat_of_the_next_engine_is_another_file(world: World) -> None:
    watch = world.hang_watch()
    later = Heartbeat(world.folder)
    for _ in range(10):
        later.beat(0.0, 1)
        world.wait(watch, 1)
    assert watch.is_hung
    assert not world.hang_watch().is_hung


def test_an_engine_is_judged_by_its_files(world: World) -> None:
    watch = world.engine_watch()
    world.write(state="loading", stage="weights")
    assert watch.look() is None  # another model may be loaded beside those that serve
    world.write(state="ready", stage="")
    assert watch.look() == ("ready", "")
    world.wait(watch, 6)
    hung = watch.look()
    assert hung is not None
    assert hung.state == "hung"
    world.heartbeat.beat(None, 1)
    assert watch.look() == ("ready", "")
    world.write(is_draining=True)
    assert watch.look() == ("draining", "the server is shutting down")
    world.write(is_draining=False, start_ticks=1)
    assert watch.look() == ("stopped", "the engine process ended")
    world.write(state="loading", start_ticks=first_status(os.getpid(), "ready", {}, "").start_ticks, stage="weights")
    assert watch.look() == ("reloading", "the engine loads again weights")
    world.write(state="failed", message="no weights", is_given_up=True)
    final = watch.look()
    assert final == ("given up", "no weights")
    assert not final.is_live


def test_an_unloaded_model_is_not_missed(world: World) -> None:
    watch = world.engine_watch()
    assert watch.look() == ("ready", "")
    world.leave()
    assert watch.look() == ("ready", "")
    world.write(state="stopped")
    assert watch.look() is None
    world.write(state="loading")
    assert watch.look() is None
    world.write(state="failed", message="no weights", is_given_up=True)
    assert watch.look() is None  # the client that loads it is told, and others are served


def test_an_engine_without_a_front_end_serves_nobody(world: World) -> None:
    watch = world.engine_watch()
    assert watch.look() == ("ready", "")
    world.leave()
    world.clock.now += UNUSED_S + 0.1
    world.heartbeat.beat(None, 1)
    assert watch.look() == ("stopped", GONE)


def test_a_front_end_that_says_nothing_serves_nobody(world: World) -> None:
    watch = world.engine_watch()
    for num_front_ends, state in ((1, "ready"), (0, "stopped"), (1, "ready")):
        world.heartbeat.beat(None, num_front_ends)
        watch.look()
        world.wait(watch, UNUSED_S + 2 * LOOK_S)
        seen = watch.look()
        assert seen is not None
        assert seen.state == state


def test_to_ask_for_the_owner_takes_nothing(world: World) -> None:
    assert is_locked(world.folder / LOCK)
    world.leave()
    assert not is_locked(world.folder / LOCK)
    fcntl.flock(world.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not is_locked(world.folder / "nowhere" / LOCK)
