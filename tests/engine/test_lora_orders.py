"""Adapters of a real engine process with a fake device: orders of clients, requests, a crash."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engine.engine_clients import Client, request
from support.engine.faulty_engine import DIES
from support.engine.lora_doubles import write_lora
from support.engine.targets import new_target
from tidewheel.config import EngineConfig
from tidewheel.engine.folder import LOG, LORAS
from tidewheel.engine.launcher import stop_engine

Connect = Callable[..., Client]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of an engine in that of its model."""
    model_dir = Path(tempfile.mkdtemp(prefix="tw-"))
    path = model_dir / "engine"
    path.mkdir(mode=0o700)
    yield path
    stop_engine(path)
    shutil.rmtree(model_dir, ignore_errors=True)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    for name in ("a", "new"):
        write_lora(tmp_path / name)
    write_lora(tmp_path / "b", "broken")
    named = {name: str(tmp_path / name) for name in "ab"}
    return EngineConfig(model="ok", enable_lora=True, lora_modules=json.dumps(named), lora_dir=str(tmp_path))


class Orders:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.recorder = client.recorder
        self._num_sent = 100

    def order(self, order: str, name: str = "", path: str = "") -> str:
        """Return the answer, or tag and message of the error."""
        self._num_sent += 1
        key = self._num_sent
        self.client.add(request(key, lora_order=order, lora_name=name, lora_path=path))
        self.recorder.wait_ended(key)
        if self.recorder.endings[key] == "stop":
            return self.recorder.answers[key]
        return f"{self.recorder.endings[key]}: {self.recorder.errors[key]}"

    def names(self) -> list[str]:
        return [row["name"] for row in json.loads(self.order("list"))]


def ends(client: Client, key: int, name: str) -> str:
    """Send a request for an adapter; return how it ends."""
    client.add(request(key, 5, 6, 7, lora_name=name))
    client.recorder.wait_ended(key)
    return client.recorder.errors[key] or client.recorder.endings[key]


def test_adapters_come_and_go(connect: Connect, config: EngineConfig, folder: Path) -> None:
    client = connect(config=config)
    orders = Orders(client)
    assert "LoRA b: b: rank 64 is over max_lora_rank 16" in (folder / LOG).read_text()
    assert orders.names() == ["a", "b"]
    assert orders.order("load", "new", "new") == ""
    assert orders.names() == ["a", "b", "new"]
    assert [ends(client, key, name) for key, name in enumerate(("a", "new", ""), 1)] == ["length"] * 3
    assert ends(client, 4, "b") == "LoRA b: b: rank 64 is over max_lora_rank 16"
    assert orders.order("unload", "new") == ""
    unknown = "LoRA new is not supported, we currently support ['a', 'b']"
    assert ends(client, 5, "new") == unknown
    assert orders.order("unload", "new") == f"TW-NOT-FOUND: {unknown}"
    assert orders.order("load", "new", "/etc").startswith("TW-INPUT: lora_path leads to /etc: it must lie below")
    assert orders.order("load", "new", "b") == "TW-INPUT: LoRA new: b: rank 64 is over max_lora_rank 16"


def test_a_restarted_engine_knows_what_was_loaded(connect: Connect, config: EngineConfig, folder: Path) -> None:
    client = connect(config=config)
    orders = Orders(client)
    assert orders.order("load", "mine", "new") == ""
    assert orders.order("unload", "a") == ""
    assert (folder.parent / LORAS).is_file()
    client.add(request(1, DIES))
    client.recorder.wait_ended(1)
    assert orders.names() == ["b", "mine"]
    assert ends(client, 2, "mine") == "length"


def test_without_adapters(connect: Connect) -> None:
    client = connect()
    orders = Orders(client)
    refusal = "LoRA feature is not enabled. Set enable_lora to true"
    assert ends(client, 1, "a") == refusal
    assert orders.order("load", "a", "/a") == orders.order("unload", "a") == f"TW-UNSUPPORTED: {refusal}"
    assert orders.order("list") == "[]"


def test_a_running_engine_takes_another_file_of_names(
    connect: Connect, config: EngineConfig, folder: Path, tmp_path: Path
) -> None:
    first = connect(config=config)
    orders = Orders(first)
    assert orders.order("load", "new", "new") == ""
    named = {"c": str(write_lora(tmp_path / "c"))}
    changed = EngineConfig.from_settings({**config.to_settings(), "lora_modules": json.dumps(named)})
    target = new_target(folder, changed)._replace(identity=first.status.identity, started=config)
    second = connect(target=target)
    assert first.info.pid == second.info.pid
    assert orders.names() == ["c", "new"]
