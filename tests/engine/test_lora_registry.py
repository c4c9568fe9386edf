"""Names, versions, orders and host memory of adapters, with reads that the test ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine.lora_doubles import FakeLoraRunner, FakeSlots, ManualExecutor, write_lora
from tidewheel.config import EngineConfig
from tidewheel.engine import lora_registry
from tidewheel.engine.folder import LORAS
from tidewheel.engine.lora_registry import MAX_READS, LoraRegistry
from tidewheel.errors import Busy, InternalError, InvalidRequest, NotFound, TidewheelError
from tidewheel.lora import Lora
from tidewheel.request import FinishReason
from tidewheel.request_options import RequestOptions


class Harness:
    def __init__(self, folder: Path, names: str = "", **settings: object) -> None:
        self.folder = folder
        self.runner, self.slots, self.executor = FakeLoraRunner(), FakeSlots(), ManualExecutor()
        self.answers: list[str | TidewheelError] = []
        for name in names:
            write_lora(folder / name)
        modules = json.dumps({name: str(folder / name) for name in names}) if names else ""
        self.settings: dict[str, Any] = {
            "model": "m", "enable_lora": True, "lora_dir": str(folder), "lora_modules": modules,
            "max_loras": 1, "max_cpu_loras": 2, **settings,
        }  # fmt: skip
        self.registry = self.start()

    def start(self) -> LoraRegistry:
        """Make a registry, as a new engine does."""
        file = self.folder / LORAS
        config = EngineConfig.from_settings(self.settings)
        self.registry = LoraRegistry(config, self.runner, self.slots, file)
        self.registry._executor = self.executor
        return self.registry

    def order(self, order: str, name: str = "", path: str = "") -> None:
        def answer(outcome: FinishReason | TidewheelError, text: str = "") -> None:
            self.answers.append(outcome if isinstance(outcome, TidewheelError) else text)

        self.registry.take_order(RequestOptions(lora_order=order, lora_name=name, lora_path=path), answer)

    def take_names(self, modules: dict[str, str]) -> None:
        self.settings["lora_modules"] = json.dumps(modules)
        self.registry.reconfigure(EngineConfig.from_settings(self.settings))

    def finish(self) -> None:
        self.executor.run()
        self.registry.poll()

    def load(self, name: str, path: str = "") -> str | TidewheelError:
        """Order a load, and return its answer."""
        self.order("load", name, path or name)
        self.finish()
        return self.answers.pop()

    def list(self) -> list[dict[str, Any]]:
        self.order("list")
        answer = self.answers.pop()
        assert isinstance(answer, str)
        rows: list[dict[str, Any]] = json.loads(answer)
        return rows

    def find(self, name: str) -> Lora:
        lora = self.registry.find(name)
        assert lora is not None
        return lora

    def ask(self, name: str) -> Lora:
        """Have the scheduler ask for an adapter's weights; return it."""
        lora = self.find(name)
        self.slots.load(lora)
        self.finish()
        return lora


def message(error: object) -> str:
    assert isinstance(error, TidewheelError)
    return error.message


def test_weights_are_read_when_the_scheduler_asks(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ab")
    lora = harness.find("a")
    assert lora.weights is None
    for _ in range(3):  # at each step
        harness.slots.load(lora)
    assert harness.registry.reads
    harness.registry.poll()
    assert lora.weights is None
    harness.finish()
    assert lora.weights.text == "ok" and lora.rank == 8
    assert harness.runner.read == ["a"]
    assert harness.find("a") is lora


def test_defects_are_logged_before_the_first_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, "abc")
    write_lora(tmp_path / "b", "broken")
    harness.start()
    assert [record.getMessage() for record in caplog.records] == ["LoRA b: b: rank 64 is over max_lora_rank 16"]
    assert harness.runner.read == []


def test_a_defective_adapter_is_read_again_for_later_requests(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "a")
    write_lora(tmp_path / "a", "broken")
    lora = harness.ask("a")
    assert message(lora.error) == "LoRA a: a: rank 64 is over max_lora_rank 16"
    harness.slots.load(lora)  # of its requests, which end
    assert not harness.registry.reads
    write_lora(tmp_path / "a", "mended")
    again = harness.ask("a")
    assert again.version > lora.version and again.weights.text == "mended"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("broken", InvalidRequest, "LoRA x: x: rank 64"),
        ("crash", InternalError, "LoRA x cannot be read; the server's log says why"),
    ],
)
def test_an_order_ends_with_the_defect(tmp_path: Path, text: str, kind: type[TidewheelError], words: str) -> None:
    harness = Harness(tmp_path, "a")
    write_lora(tmp_path / "x", text)
    error = harness.load("x")
    assert isinstance(error, kind) and error.message.startswith(words)
    assert [row["name"] for row in harness.list()] == ["a"]


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    error = harness.load("x", "nowhere")
    assert isinstance(error, NotFound) and f"there is no folder {tmp_path / 'nowhere'}" in error.message


def test_paths_of_clients_lie_below_a_folder(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "loras")
    outside = write_lora(tmp_path / "outside")
    write_lora(tmp_path / "loras" / "inside")
    (tmp_path / "loras" / "link").symlink_to(outside)
    for path in ("../outside", str(outside), "link", "inside/../../outside"):
        assert "must lie below lora_dir" in message(harness.load("x", path))
    assert harness.runner.read == []
    assert harness.load("x", str(tmp_path / "loras" / "inside")) == ""


def test_another_version_of_a_name(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "a")
    first = harness.ask("a")
    write_lora(tmp_path / "new", "new")
    assert harness.load("a", "new") == ""
    second = harness.find("a")
    assert second.version > first.version and second.weights.text == "new"
    assert first.weights.text == "ok"  # of requests that were accepted before
    write_lora(tmp_path / "new", "broken")
    assert "rank 64" in message(harness.load("a", "new"))
    assert harness.find("a") is second


def test_files_that_change_under_a_version(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "abc")
    lora = harness.ask("a")
    harness.ask("b")
    harness.ask("c")
    assert lora.weights is None
    write_lora(tmp_path / "a", "another")
    os.utime(tmp_path / "a" / "weights", (1, 1))
    harness.ask("a")
    assert lora.error is not None and "files changed after they were read" in lora.error.message
    assert harness.ask("a").weights.text == "another"


@pytest.mark.parametrize("change", ["write", "touch", "replace", "add"])
def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Ranks may have read other parts than this process."""
    harness = Harness(tmp_path, "a")
    weights, read = tmp_path / "a" / "weights", harness.runner.read_lora
    changes: dict[str, Callable[[], object]] = {
        "write": lambda: weights.write_text("another"),
        "touch": lambda: os.utime(weights, (1, 1)),
        "replace": lambda: shutil.copy(weights, tmp_path / "copy") and (tmp_path / "copy").rename(weights),
        "add": (tmp_path / "a" / "adapter_config.json").touch,
    }

    def read_and_change(folder: Path) -> object:
        found = read(folder)
        changes[change]()
        return found

    monkeypatch.setattr(harness.runner, "read_lora", read_and_change)
    assert "files changed after they were read: load it again" in message(harness.load("new", "a"))
    monkeypatch.undo()
    assert harness.load("new", "a") == ""


def test_unloaded_names_are_unknown(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ab")
    lora = harness.ask("a")
    harness.order("unload", "a")
    assert harness.answers == [""]
    with pytest.raises(NotFound, match=r"LoRA a is not supported, we currently support \['b'\]"):
        harness.find("a")
    with pytest.raises(NotFound):
        harness.order("unload", "a")
    assert lora.weights is not None  # for accepted requests
    harness.ask("b")
    write_lora(tmp_path / "c")
    harness.load("c")
    assert lora.weights is None and harness.find("c").weights is not None  # the first to be dropped


def test_many_names_are_not_all_told(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "abcdefghijk")
    with pytest.raises(NotFound, match=r"support \['a', 'b', .*, 'h'\] and 3 more$"):
        harness.find("x")


def test_the_list(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ba")
    write_lora(tmp_path / "b", "broken")
    harness.ask("a")
    harness.ask("b")
    assert harness.list() == [
        {"name": "a", "path": str(tmp_path / "a"), "rank": 8, "is_loaded": True},
        {"name": "b", "path": str(tmp_path / "b"), "rank": None, "is_loaded": False},
    ]


def test_orders_outlive_an_engine(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ab")
    write_lora(tmp_path / "c")
    harness.load("c")
    harness.load("b", "c")
    harness.order("unload", "a")
    harness.load("gone", "c")
    harness.order("unload", "gone")
    harness.start()
    assert {row["name"]: row["path"] for row in harness.list()} == {
        "b": str(tmp_path / "c"), "c": str(tmp_path / "c")
    }  # fmt: skip
    assert "gone" not in (tmp_path / LORAS).read_text()


def test_orders_wait_for_an_engine_with_adapters(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    write_lora(tmp_path / "a")
    harness.load("a")
    harness.settings["enable_lora"] = False
    harness.start()
    assert harness.list() == []
    harness.settings["enable_lora"] = True
    harness.start()
    assert [row["name"] for row in harness.list()] == ["a"]


def test_a_file_of_orders_that_nothing_can_read(tmp_path: Path) -> None:
    (tmp_path / LORAS).write_text('{"a": 5}')
    assert [row["name"] for row in Harness(tmp_path, "b").list()] == ["b"]


def test_an_order_holds_though_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lora_registry, "write_value", fail)
    harness = Harness(tmp_path)
    write_lora(tmp_path / "a")
    assert harness.load("a") == ""
    assert "No space left" in caplog.text and harness.find("a")


def test_a_changed_file_of_names(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "abc")
    kept, moved = harness.ask("a"), harness.ask("b")
    harness.order("unload", "c")
    write_lora(tmp_path / "d")
    named = {"a": str(tmp_path / "a"), "b": str(tmp_path / "d"), "c": str(tmp_path / "c"), "d": str(tmp_path / "d")}
    harness.registry.reconfigure(EngineConfig.from_settings({**harness.settings, "lora_modules": json.dumps(named)}))
    assert harness.find("a") is kept and harness.find("b") is not moved
    assert [row["name"] for row in harness.list()] == ["a", "b", "d"]


def test_only_so_many_orders_wait(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    write_lora(tmp_path / "a")
    for number in range(MAX_READS):
        harness.order("load", f"a{number}", "a")
    with pytest.raises(Busy, match="64 adapters wait to be read"):
        harness.order("load", "late", "a")
    harness.finish()
    assert harness.answers == [""] * MAX_READS


def test_only_so_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_registry, "MAX_LORA_NAMES", 2)
    harness = Harness(tmp_path, "ab")
    write_lora(tmp_path / "c")
    with pytest.raises(InvalidRequest, match="2 adapters are loaded: at most 2 may; unload one"):
        harness.order("load", "c", "c")
    assert harness.load("a", "c") == ""
    harness.order("unload", "b")
    harness.order("load", "b", "c")  # not read yet
    with pytest.raises(InvalidRequest, match="at most 2 may"):
        harness.order("load", "c", "c")


def test_the_least_recently_used_weights_make_room(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "abc")
    a, b = harness.ask("a"), harness.ask("b")
    harness.slots.running = {a}
    harness.registry.poll()
    harness.slots.running = set()
    c = harness.ask("c")
    assert [lora.weights is not None for lora in (a, b, c)] == [True, False, True]


def test_weights_in_use_stay_and_a_load_waits(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "abc")
    a, b = harness.ask("a"), harness.ask("b")
    harness.slots.running, harness.slots.waiting = {a}, {b}  # b has not run yet
    c = harness.ask("c")
    assert (a.weights and b.weights) and c.weights is None and not harness.registry.reads
    harness.slots.running = {b}
    harness.registry.poll()
    harness.slots.running, harness.slots.waiting = {a}, {b}  # it has, so others come first
    harness.ask("c")
    assert b.weights is None and c.weights is not None


def test_orders_that_wait_take_no_weights_from_requests(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ab")
    write_lora(tmp_path / "c")
    b = harness.ask("b")
    a = harness.find("a")
    harness.slots.waiting = {a}
    harness.slots.load(a)
    for name in "cdef":
        harness.order("load", name, "c")
    harness.executor.calls.pop(0)()
    harness.registry.poll()
    assert a.weights is not None and b.weights is not None
    b.weights = None
    del harness.registry._resident[b]
    harness.slots.load(b)
    assert b in harness.registry.reads


def test_an_order_reads_though_memory_is_full(tmp_path: Path) -> None:
    harness = Harness(tmp_path, "ab")
    harness.slots.running = {harness.ask("a"), harness.ask("b")}
    write_lora(tmp_path / "c")
    assert harness.load("c") == ""
    lora = harness.find("c")
    assert lora.weights is None and lora.rank == 8


def play(harness: Harness, event: str, name: str) -> None:
    """Let clients and the scheduler act on an adapter."""
    slots, known = harness.slots, {row["name"] for row in harness.list()}
    if event == "load" or (event == "unload" and name in known):
        harness.order(event, name, name if event == "load" else "")
    if event in ("load", "unload") or name not in known:
        return
    lora = harness.find(name)
    if event == "ask":
        slots.waiting.add(lora)
        slots.load(lora)
    elif event == "run" and lora.weights is not None and len(slots.running) < 2:
        slots.running.add(lora)
    elif event == "end":
        slots.running.discard(lora)
        slots.waiting.discard(lora)
    else:
        harness.finish()


EVENTS = st.sampled_from(["ask", "load", "unload", "run", "end", "finish"])


@given(events=st.lists(st.tuples(EVENTS, st.sampled_from("abcdef")), max_size=60))
def test_memory_keeps_its_limit_and_what_is_used(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str]]
) -> None:
    made: list[Lora] = []

    def make(*fields: Any) -> Lora:
        made.append(Lora(*fields))
        return made[-1]

    with mock.patch.object(lora_registry, "Lora", make):
        check_memory(Harness(tmp_path_factory.mktemp("loras"), "abcdef", max_loras=2, max_cpu_loras=3), made, events)


def check_memory(harness: Harness, made: list[Lora], events: list[tuple[str, str]]) -> None:
    slots = harness.slots
    for event, name in events:
        play(harness, event, name)
        assert sum(lora.weights is not None for lora in made) <= 3
        assert all(lora.weights is not None for lora in slots.running)
    harness.finish()
    # Each adapter that waits is read in the end, if those that were read run and end.
    for lora in list(slots.waiting):
        for _ in range(len(made)):
            slots.load(lora)
            harness.finish()
            slots.running = {one for one in made if one.weights is not None and one is not lora}
            harness.registry.poll()
            slots.running = set()
            if lora.weights is not None:
                break
        assert lora.weights is not None
        slots.waiting.remove(lora)
