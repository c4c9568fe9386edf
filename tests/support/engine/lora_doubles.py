"""Doubles around a registry of adapters: reads that a test ends, and the scheduler's view of requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.lora import Lora
from tidewheel.scheduler.lora_slots import LoraSlots


@dataclass(frozen=True)
class FakeWeights:
    text: str  # of the folder's file
    rank: int = 8
    num_bytes: int = 1 << 20


class FakeLoraRunner:
    """Reads folders whose file `weights` says what is wrong with them, if anything is."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def check_lora(self, folder: Path) -> None:
        _open(folder)

    def read_lora(self, folder: Path) -> FakeWeights:
        self.read.append(folder.name)
        return FakeWeights(_open(folder))


def _open(folder: Path) -> str:
    text = (folder / "weights").read_text()
    if text == "broken":
        raise ConfigError(f"{folder.name}: rank 64 is over max_lora_rank 16")
    if text == "crash":
        raise ZeroDivisionError
    return text


def write_lora(folder: Path, text: str = "ok") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(text)
    return folder


class ManualExecutor(Executor):
    """Runs a call when a test says so, in order."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(function(*arguments, **options))
            except Exception as error:
                done.set_exception(error)

        self.calls.append(call)
        return done

    def run(self) -> None:
        while self.calls:
            self.calls.pop(0)()


class FakeSlots(LoraSlots):
    """What a registry knows of a scheduler, as a test says."""

    running: set[Lora] = set()  # type: ignore[assignment]  # noqa: RUF012 - an instance has its own
    waiting: set[Lora] = set()  # type: ignore[assignment]  # noqa: RUF012 - an instance has its own

    def __init__(self) -> None:
        self.running, self.waiting = set(), set()
