"""Faults that pass: each ends what is in flight, and the engine serves again when the cause is gone."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from support.engine.engine_clients import LIMIT_S, Client, endless, request
from support.engine.faulty_engine import CRASHES_AT_LOAD, DIES, FAILS_TO_LOAD, LOADS_FOREVER, READS
from support.engine.targets import new_target
from tidewheel.config import EngineConfig
from tidewheel.engine import launcher, process
from tidewheel.engine.folder import DEATHS, STATUS, Status, read_status
from tidewheel.engine.heartbeat import ListeningClock
from tidewheel.engine.launcher import EngineLauncher
from tidewheel.errors import ConfigError, EngineDead, PermanentError
from tidewheel_process.child import Child, ProcessHandle, RestartPolicy
from tidewheel_process.locked_folder import LOCK, try_lock, unlock

Connect = Callable[..., Client]

HELD_S = 0.3
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file of a model that an engine reads."""
    path = tmp_path / "weights"
    path.write_text("good")
    return path


def poll(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def reading(model: Path) -> EngineConfig:
    return EngineConfig(model=f"{READS}{model}")


def kill(client: Client) -> Status:
    status = client.status
    os.kill(client.info.pid, signal.SIGKILL)
    poll(lambda: client._connection is None or client.info.pid != status.pid, "the loss")
    return status


def next_error(client: Client, key: int, word: str) -> None:
    """Wait until a request ends with an error that has this word, which it does after its time for the engine."""
    deadline = time.monotonic() + LIMIT_S
    while word not in client.recorder.errors.get(key, ""):
        assert time.monotonic() < deadline, client.recorder.errors
        key += 1
        client.add(request(key, 1))
        client.recorder.wait_ended(key)
        assert client.recorder.endings[key] == "TW-ENGINE-DEAD"


def wait_serves(client: Client, key: int = 1000) -> None:
    deadline = time.monotonic() + LIMIT_S
    while client.recorder.endings.get(key) != "length":
        assert time.monotonic() < deadline, client.recorder.errors
        key += 1
        client.add(request(key, 1))
        client.recorder.wait_ended(key)


@pytest.mark.parametrize(
    ("fault", "word"), [(FAILS_TO_LOAD, "model.safetensors is missing"), (CRASHES_AT_LOAD, "the loader fell over")]
)
def test_a_model_that_is_away_for_a_moment(connect: Connect, model: Path, fault: str, word: str) -> None:
    owner, other = (connect(config=reading(model), hold_s=HELD_S) for _ in range(2))
    model.write_text(fault)
    kill(owner)
    next_error(owner, 1, word)
    next_error(other, 1, "not back")
    model.write_text("good")
    for client in (owner, other):
        wait_serves(client)


def test_failed_loads_are_no_crash_loop(connect: Connect, model: Path, folder: Path) -> None:
    policy = RestartPolicy(first_delay_s=0.01, max_deaths=2)
    client = connect(config=reading(model), hold_s=HELD_S, restart=policy)
    model.write_text(CRASHES_AT_LOAD)
    kill(client)
    poll(lambda: client._launcher._num_failed_starts >= 3, "three starts")
    model.write_text("good")
    wait_serves(client)


@pytest.mark.parametrize("broken", ["write_status", "write_value"])
def test_a_run_directory_that_is_full_when_the_engine_dies(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, folder: Path, broken: str
) -> None:
    client = connect(hold_s=HELD_S)

    def fail(*_: object) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(launcher.folder, broken, fail)
        patch.setattr(launcher, broken, fail, raising=False)
        kill(client)
        next_error(client, 1, f"{folder} cannot be written (No space left on device): make room")
    wait_serves(client)


@pytest.mark.parametrize("loads", [True, False])
def test_every_front_end_says_that_there_is_no_room(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, loads: bool
) -> None:
    """An engine that loads cannot say that it is ready. Without one, its owner cannot say why."""
    owner, other = (connect(config=reading(model), hold_s=HELD_S) for _ in range(2))

    def fail(*_: object) -> None:
        raise FULL

    if not loads:
        monkeypatch.setattr(launcher.folder, "write_status", fail)
    model.write_text(LOADS_FOREVER)
    old = kill(owner)
    if loads:
        poll(lambda: owner.status.pid != old.pid and owner.status.stage == "weights", "another start")
    monkeypatch.setattr(Path, "write_bytes", fail)
    for client in (owner, other):
        next_error(client, 1, f"{folder} cannot be written (No space left on device): make room")


def test_an_engine_whose_first_status_cannot_be_written_is_ended(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[int] = []

    def spawn(*arguments: Any, **options: Any) -> Child:
        started = Child(*arguments, **options)
        spawned.append(started.pid)
        return started

    def fail(*_: object) -> None:
        raise FULL

    client = connect(start=False)
    monkeypatch.setattr(launcher, "Child", spawn)
    monkeypatch.setattr(launcher.folder, "write_status", fail)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\): make room"):
        client.start(LIMIT_S)
    (pid,) = spawned
    poll(lambda: not Path(f"/proc/{pid}").exists(), "the engine runs on")


def test_no_error_ends_the_thread_of_a_client(connect: Connect) -> None:
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    connection = client._connection
    assert connection is not None

    def fail(timeout_ms: int = 0) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    connection.receive = fail  # type: ignore[method-assign,assignment]
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "TW-INTERNAL"
    wait_serves(client)


def test_a_status_that_is_lost_or_torn_is_written_again(connect: Connect, folder: Path) -> None:
    first = connect()
    for harm in (lambda: (folder / STATUS).unlink(), lambda: tear(folder / STATUS)):
        harm()
        second = connect()
        assert second.info.pid == first.info.pid
        second.add(request(1, 1))
        second.recorder.wait_ended(1)


def tear(path: Path) -> None:
    torn = path.with_name("torn")
    torn.write_bytes(path.read_bytes()[:20])
    torn.replace(path)


def test_a_crash_loop_ends_with_the_next_load(connect: Connect, folder: Path) -> None:
    failed = connect(restart=RestartPolicy(first_delay_s=0.01, max_deaths=2))
    for key in (1, 2):
        failed.add(request(key, DIES))
        failed.recorder.wait_ended(key)
    poll(lambda: failed.has_failed, "the end of the crash loop")
    with pytest.raises(EngineDead, match="died 2 times"):
        failed.add(request(3, 1))
    assert failed.status.is_given_up
    loaded = connect(restart=RestartPolicy(first_delay_s=0.01, max_deaths=2))
    assert loaded.is_owner and not (folder / DEATHS).exists()
    loaded.add(request(1, DIES))
    loaded.recorder.wait_ended(1)
    wait_serves(loaded)


def test_a_start_that_hangs_when_its_owner_dies_is_ended_by_the_next(connect: Connect, model: Path) -> None:
    config = reading(model)
    owner = connect(config=config)
    target = new_target(owner._engine_dir, config)._replace(
        config=EngineConfig(model=config.model, engine_start_timeout_s=0.2)
    )
    other = connect(target=target, hold_s=HELD_S)
    model.write_text(LOADS_FOREVER)
    old = kill(owner)
    poll(lambda: owner.status.pid != old.pid and owner.status.stage == "weights", "another start")
    hanging = owner.status
    owner.close()
    handle = ProcessHandle(hanging.pid, hanging.start_ticks)
    try:
        assert handle.wait(LIMIT_S), "the engine hangs for ever"
    finally:
        handle.close()
    assert other.is_owner


def test_the_owner_of_a_removed_lock_makes_another(folder: Path) -> None:
    owner, other = (
        EngineLauncher(new_target(folder, EngineConfig(model="ok")), command=(), policy=RestartPolicy())
        for _ in range(2)
    )
    assert owner.try_lock() and not other.try_lock()
    (folder / LOCK).unlink()
    assert other.try_lock() and not owner.try_lock()
    other.release()
    assert owner.try_lock()
    owner.release()


def test_settings_that_an_engine_does_not_know_are_permanent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "protect_texts", lambda: None)  # it is this process
    arguments = ["--engine-dir", str(folder), "--settings", '{"model": "m", "max_num_seq": 3}']
    assert process.main(arguments) == process.EXIT_LOAD_FAILED
    status = read_status(folder)
    assert status is not None and status.state == "failed" and status.is_given_up
    assert "max_num_seqs" in status.message
    owner = try_lock(folder / LOCK)
    assert owner is not None
    with pytest.raises(PermanentError):
        EngineLauncher(new_target(folder, EngineConfig(model="m")), command=(), policy=RestartPolicy()).seek(0)
    unlock(owner)


def test_a_status_that_the_disk_does_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = process.StatusFile(tmp_path, {"model": "m"}, "")
    write = launcher.folder.write_status

    def fail(*_: object) -> None:
        raise FULL

    monkeypatch.setattr(launcher.folder, "write_status", fail)
    status.update(is_draining=True)
    status.keep()
    assert read_status(tmp_path) is None
    monkeypatch.setattr(launcher.folder, "write_status", write)
    status.keep()
    found = read_status(tmp_path)
    assert found is not None and found.is_draining


def test_a_pause_of_the_listener_is_no_silence() -> None:
    now = 0.0
    clock = ListeningClock(lambda: now)
    now = 0.5
    assert clock() == 0.5
    now = 100.5
    assert clock() == 1.5
    now = 101.0
    assert clock() == 2.0
