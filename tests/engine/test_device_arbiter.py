"""Turns of engines on one device, on a made-up clock; real processes at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from tidewheel.config import EngineConfig
from tidewheel.engine import shared_device
from tidewheel.engine.shared_device import DeviceArbiter, DeviceShare, UnsharedDevice, share_device
from tidewheel.request import Priority
from tidewheel.runner.info import RunnerInfo

CRITICAL, HIGH, NORMAL, LOW = (int(one) for one in Priority)
TICK_S = 0.0005


@dataclass(eq=False)
class Engine:
    arbiter: DeviceArbiter
    service_class: int = NORMAL
    step_s: float = 0.01
    gap_s: float = 0.0005  # between two steps
    begins: float = 0.0
    ready_at: float = 0.0
    ends_at: float | None = None  # of the step that runs
    used_s: float = 0.0
    longest_wait_s: float = 0.0

    def take(self) -> bool:
        return self.arbiter.take(lambda: self.service_class)


class Device:
    """A device and its engines, which have one clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.0
        self.engines: list[Engine] = []

    def join(self, name: str, service_class: int = NORMAL, step_s: float = 0.01, **share: Any) -> Engine:
        arbiter = DeviceArbiter(self.folder / "cpu", DeviceShare(name, **share), clock=lambda: self.now)
        self.engines.append(Engine(arbiter, service_class, step_s))
        return self.engines[-1]

    def play(self, seconds: float, *engines: Engine, stops: bool = True) -> None:
        """Let engines run steps without end, no two at once; at last they are idle, if it `stops`."""
        for engine in engines:
            engine.ready_at = self.now
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for engine in engines:
                if engine.ends_at is not None and engine.ends_at <= self.now:
                    engine.arbiter.give_back(ran=True)
                    engine.ends_at, engine.ready_at = None, self.now + engine.gap_s
            for engine in engines:
                if engine.ends_at is None and engine.ready_at <= self.now and engine.take():
                    assert not [one for one in engines if one.ends_at is not None]
                    engine.longest_wait_s = max(engine.longest_wait_s, self.now - engine.ready_at)
                    engine.used_s += engine.step_s
                    engine.ends_at = self.now + engine.step_s
        for engine in engines if stops else ():
            engine.arbiter.give_back(ran=False)
            engine.arbiter.take(lambda: 0)
            engine.ends_at = None


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    device = Device(tmp_path)
    yield device
    for engine in device.engines:
        engine.arbiter.close()


def test_an_engine_alone_never_waits(device: Device) -> None:
    alone = device.join("a")
    assert alone.take() and alone.take() and alone.arbiter.slice_s is None
    alone.arbiter.give_back(ran=True)


def test_the_next_step_begins_when_the_last_is_over(device: Device) -> None:
    a, b = device.join("a"), device.join("b")
    assert a.take() and not b.take()
    device.now += 0.01
    a.arbiter.give_back(ran=True)
    assert not a.take()  # it used more
    assert b.take() and b.arbiter.waited_s == pytest.approx(0.01)


def test_engines_that_fit_the_device_together_take_no_turns(device: Device) -> None:
    a, b = device.join("a", cores=0.5), device.join("b", cores=0.5)
    assert a.take() and b.take() and b.arbiter.slice_s is None
    c, unlimited = device.join("c", cores=0.5), device.join("u", cores=0.0)
    assert a.take() and not c.take() and unlimited.take()


def test_the_better_class_is_next(device: Device) -> None:
    runs, low, critical = device.join("r"), device.join("l", LOW), device.join("c", CRITICAL)
    assert runs.take() and not low.take() and not critical.take()
    device.now += 0.01
    runs.arbiter.give_back(ran=True)
    assert not low.take() and critical.take()


@pytest.mark.parametrize(("service_class", "part"), [(CRITICAL, 12.0), (HIGH, 6.0), (NORMAL, 3.0)])
def test_time_is_shared_by_weight_and_class(device: Device, service_class: int, part: float) -> None:
    a, b = device.join("a", service_class, 0.012, weight=3.0), device.join("b", step_s=0.02)
    device.play(8.0, a, b)
    assert a.used_s / b.used_s == pytest.approx(part, rel=0.1)
    assert a.used_s + b.used_s > 7.5


def test_a_critical_stream_waits_for_at_most_one_slice(device: Device) -> None:
    text = device.join("t", CRITICAL, 0.012)
    images, speech = device.join("i", step_s=0.02), device.join("s", step_s=0.002)
    device.play(4.0, images, speech, text)
    assert text.longest_wait_s <= images.step_s + 2 * TICK_S
    assert text.used_s > 2.0 and min(images.used_s, speech.used_s) > 0.3


def test_an_idle_engine_saves_no_time(device: Device) -> None:
    a, b = device.join("a"), device.join("b")
    device.play(2.0, a)
    device.play(0.5, a, b)
    assert b.used_s < 0.3


def test_waiting_lifts_a_class(device: Device) -> None:
    first, second = device.join("f", HIGH), device.join("s", HIGH)
    low = device.join("l", LOW)
    device.play(4.0, first, second, low)
    assert low.used_s > 0.0 and low.longest_wait_s < 4 * shared_device.AGEING_S


def test_two_critical_engines_leave_turns_to_a_third(device: Device) -> None:
    text, images, low = device.join("t", CRITICAL, 0.012), device.join("i", CRITICAL, 0.02), device.join("l", LOW)
    device.play(8.0, text, images, low, stops=False)
    assert low.used_s > 0.0 and low.longest_wait_s <= 3 * shared_device.AGEING_S + 0.04
    low.service_class, low.longest_wait_s, text.longest_wait_s = CRITICAL, 0.0, 0.0
    device.play(8.0, text, images, low)  # what it did not use as LOW, it has not saved up
    assert text.longest_wait_s < 8 * (shared_device.CREDIT_S + 0.05)


def test_an_engine_without_requests_lets_others_run(device: Device) -> None:
    a, b = device.join("a"), device.join("b")
    assert a.take() and not b.take()
    a.arbiter.give_back(ran=False)
    assert b.take()
    b.arbiter.give_back(ran=True)
    assert not a.arbiter.take(lambda: 0) and b.take()


def test_with_steps_in_flight_an_engine_gives_way_to_one_that_is_next(device: Device) -> None:
    a, b = device.join("a"), device.join("b")
    assert a.take() and a.take()
    assert not b.take()
    device.now += 0.01
    assert not a.take()
    a.arbiter.give_back(ran=True)
    assert b.take()


def test_an_engine_that_stopped_holds_nobody_up(device: Device) -> None:
    a, stopped = device.join("a"), device.join("s", CRITICAL)
    assert a.take() and not stopped.take()
    a.arbiter.give_back(ran=True)
    assert not a.take()
    device.now += 2 * shared_device.STALE_S
    assert a.take()
    a.arbiter.give_back(ran=True)
    assert stopped.take()
    device.now += 0.01
    assert not a.take()
    device.now += shared_device.OVERDUE_S
    assert a.take()
    device.now += 0.01
    assert a.take()


def test_a_language_model_is_cut_only_beside_a_better_class(device: Device) -> None:
    images, text = device.join("i", is_one_shot=True, slice_s=0.03), device.join("t", CRITICAL)
    assert text.take() and not images.take()
    assert (images.arbiter.slice_s, text.arbiter.slice_s) == (0.03, None)
    text.service_class, images.service_class = LOW, HIGH
    assert not images.take() and text.take() is False
    assert text.arbiter.slice_s == 0.02
    device.now += 2 * shared_device.RECENT_S
    assert text.arbiter.slice_s is None


INFO = RunnerInfo(
    model="m", architecture="a", device="cpu (2 threads)", dtype="", vocab_size=1, max_model_len=1,
    max_num_seqs=1, max_num_batched_tokens=1, block_size=1, weights_bytes=1,
)  # fmt: skip


def test_all_ranks_of_an_engine_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device.os, "sched_getaffinity", lambda _pid: range(8))
    shares: list[DeviceShare] = []
    monkeypatch.setattr(shared_device, "DeviceArbiter", lambda _base, share: shares.append(share))
    for num_ranks in (1, 2, 8):
        share_device(EngineConfig(model="m", tensor_parallel_size=num_ranks), INFO, tmp_path / "d", "m")
    assert [share.cores for share in shares] == [0.25, 0.5, 1.0]


def test_an_open_folder_only_ends_turns(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert type(share_device(EngineConfig(model="m"), INFO, tmp_path / "open", "m")) is UnsharedDevice


def test_an_engine_beyond_the_table_takes_no_turns_and_says_so(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [device.join(f"m{number}") for number in range(shared_device.MAX_ENGINES)]
    device.play(0.5, *engines)
    assert all(engine.used_s for engine in engines)
    assert type(share_device(EngineConfig(model="m"), INFO, device.folder, "m")) is UnsharedDevice
    assert "takes no turns" in caplog.text and "32 engines" in caplog.text
    device.engines.pop(5).arbiter.close()
    last = share_device(EngineConfig(model="m"), INFO, device.folder, "m")
    assert type(last) is DeviceArbiter
    last.close()


_HOLDER = """
import sys
from pathlib import Path
from tidewheel.engine.shared_device import DeviceArbiter, DeviceShare
arbiter = DeviceArbiter(Path(sys.argv[1]), DeviceShare("child"))
print("joined", flush=True)
while sys.stdin.readline() == "take\\n":
    while not arbiter.take(lambda: 3):
        pass
    print("taken", flush=True)
    if sys.stdin.readline() == "give\\n":
        arbiter.give_back(ran=True)
        print("given", flush=True)
"""


class Child:
    def __init__(self, base: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expect("joined")

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)

    def expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setattr(shared_device, "OVERDUE_S", 1e9)  # on a busy machine, too
    child = Child(tmp_path / "cpu")
    yield child
    child.kill()


def test_processes_take_turns_and_wake_each_other(tmp_path: Path, child: Child) -> None:
    arbiter = DeviceArbiter(tmp_path / "cpu", DeviceShare("parent"))
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        child.say("take")
        child.expect("taken")
        assert not arbiter.take(lambda: CRITICAL)
        child.say("give")
        child.expect("given")
        arbiter.wait(socket, 0)
        assert arbiter.take(lambda: CRITICAL)
        arbiter.give_back(ran=True)
    arbiter.close()


def test_a_killed_engine_holds_nobody_up_and_frees_its_row(tmp_path: Path, child: Child) -> None:
    arbiter = DeviceArbiter(tmp_path / "cpu", DeviceShare("parent"))
    child.say("take")
    child.expect("taken")
    assert not arbiter.take(lambda: NORMAL)
    child.kill()
    assert arbiter.take(lambda: NORMAL)
    arbiter.give_back(ran=True)
    last = DeviceArbiter(tmp_path / "cpu", DeviceShare("last"))
    assert last.take(lambda: NORMAL) and not arbiter.take(lambda: NORMAL)
    assert sorted(path.name for path in tmp_path.glob("cpu.[0-9]*")) == ["cpu.0", "cpu.1"]
    last.close()
    arbiter.close()
