"""Clients of engine processes, and a listener that waits for what it is told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.engine.faulty_engine import prompt_bytes
from support.engine.targets import new_target
from tidewheel.batch import Int32Array, Int64Array
from tidewheel.config import EngineConfig
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.folder import EngineTarget, Status, read_status
from tidewheel.engine.messages import AddRequest, Delta, EngineInfo, Room
from tidewheel.errors import TidewheelError
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import SamplingParams
from tidewheel.stats import EngineStats
from tidewheel_process.child import RestartPolicy

Key = int | tuple[int, int]

LIMIT_S = 90.0
# The last argument: seconds without a front end after which an engine ends. A busy machine connects late.
COMMAND = (sys.executable, "-P", "-m", "support.engine.faulty_engine", "3600")
CONFIG = EngineConfig(model="ok", max_num_seqs=16)


class Recorder:
    """An `EngineListener` that keeps everything and can be waited on.

    Of a request with several sequences, the first goes by the request's key, the others by key and index.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tokens: dict[Key, list[int]] = {}
        self.endings: dict[Key, str] = {}  # finish reason, or the tag of the error
        self.errors: dict[Key, str] = {}
        self.answers: dict[Key, str] = {}
        self.num_endings: dict[Key, int] = {}
        self.stats = [EngineStats()]
        self.rooms: list[Room] = []
        self.num_losses = self.num_drains = 0

    def on_tokens(self, keys: Int64Array, token_ids: Int32Array) -> None:
        self.on_deltas([Delta(key, [token]) for key, token in zip(keys.tolist(), token_ids.tolist(), strict=True)])

    def on_deltas(self, deltas: list[Delta]) -> None:
        with self.changed:
            for delta in deltas:
                key = delta.key if delta.index <= 0 else (delta.key, delta.index)
                assert key not in self.endings, "something follows the end"
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.error is not None:
                    self._end(key, delta.error.tag, delta.error.message)
                elif delta.finish_reason:
                    self.answers[key] = delta.answer
                    self._end(key, delta.finish_reason, "")
            self.changed.notify_all()

    def on_run(self, keys: list[int]) -> None:
        """No engine here orders that."""

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        with self.changed:
            self.num_losses += 1
            for key in keys:
                self._end(key, error.tag, error.message)
            self.changed.notify_all()

    def on_stats(self, stats: EngineStats) -> None:
        with self.changed:
            self.stats.append(stats)
            self.changed.notify_all()

    def on_room(self, room: Room) -> None:
        with self.changed:
            self.rooms.append(room)
            self.changed.notify_all()

    def on_drain(self) -> None:
        with self.changed:
            self.num_drains += 1
            self.changed.notify_all()

    def _end(self, key: Key, how: str, message: str) -> None:
        self.endings[key] = how
        self.errors[key] = message
        self.num_endings[key] = self.num_endings.get(key, 0) + 1

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, limit_s), f"{what}: not within {limit_s} s"

    def wait_ended(self, *keys: Key, limit_s: float = LIMIT_S) -> None:
        self.wait(lambda: all(key in self.endings for key in keys), f"end of {keys}", limit_s)

    def wait_started(self, *keys: Key) -> None:
        self.wait(lambda: all(self.tokens.get(key) for key in keys), f"first token of {keys}")


class Client(EngineClient):
    """A client with a recorder, of a fake engine."""

    command = COMMAND
    restart = RestartPolicy(first_delay_s=0.01)
    hold_s = LIMIT_S  # a busy machine may take longer than the default to start an engine

    def __init__(
        self,
        engine_dir: Path,
        *,
        name: str = "test",
        config: EngineConfig = CONFIG,
        target: EngineTarget | None = None,
        **options: object,
    ) -> None:
        self.recorder = Recorder()
        for option, value in options.items():
            setattr(self, option, value)
        super().__init__(target or new_target(engine_dir, config), self.recorder, name=name)

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    @property
    def status(self) -> Status:
        status = read_status(self._engine_dir)
        assert status is not None
        return status


def request(key: int, *token_ids: int, max_tokens: int = 8, **fields: object) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return add_request(key, prompt_bytes(*token_ids), sampling, **fields)


def add_request(key: int, prompt: bytes, sampling: SamplingParams, **fields: Any) -> AddRequest:
    """Make a message of its fields and those of its options."""
    options = {name: fields.pop(name) for name in RequestOptions.__struct_fields__ if name in fields}
    return AddRequest(key, prompt, sampling, options=RequestOptions(**options), **fields)


def endless(key: int, **fields: object) -> AddRequest:
    """Make a request that runs for seconds."""
    return request(key, 1, 2, 3, max_tokens=4000, **fields)
