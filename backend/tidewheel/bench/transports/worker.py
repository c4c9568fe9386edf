"""Peer engine in its own process, over the pipe protocol of `peers/worker.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.bench.errors import BenchError, RequestFailed
from tidewheel.bench.values import Offered, Outcome

PROGRAM = Path(__file__).parents[1] / "peers" / "worker.py"
START_S = 600.0
END_S = 10.0
_LINE_LIMIT = 1 << 24


class _Pending(NamedTuple):
    outcome: Outcome
    done: asyncio.Future[None]


class Worker:
    """Process from `open` to `close`; its output goes to `log`."""

    def __init__(self, python: str, kind: str, options: Mapping[str, Any], log: Path) -> None:
        self._command = [python, str(PROGRAM), kind, json.dumps(dict(options))]
        self._kind = kind
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pending: dict[int, _Pending] = {}
        self._num_sent = 0
        self._streams = True
        self.versions: dict[str, str] = {}

    async def open(self) -> None:
        try:
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=_LINE_LIMIT,
                    start_new_session=True,  # Ctrl-C reaches only this program, which ends the others
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                )
            self.versions = await self._ready()
        except OSError as error:
            raise BenchError(f"{self._command[0]} cannot be run: {error.strerror}") from None
        except BaseException:
            await self.close()
            raise
        self._reader = asyncio.create_task(self._read())

    async def send(self, offered: Offered, input_ids: Sequence[int], outcome: Outcome) -> None:
        process = self._running()
        self._num_sent += 1
        outcome.streamed = self._streams
        number = self._num_sent
        pending = _Pending(outcome, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        request = {"id": number, "input_ids": list(input_ids), "max_tokens": offered.num_output_tokens}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            await pending.done
        except (BrokenPipeError, ConnectionResetError):
            raise RequestFailed("PEER-DIED", f"{self._kind} has ended: see {self._log}") from None
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            raise RequestFailed("PEER-DIED", f"{self._kind} has ended: see {self._log}")
        return self._process

    async def _ready(self) -> dict[str, str]:
        """Return the peer's versions; raise `BenchError` if it does not start."""
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        except TimeoutError:
            raise BenchError(f"{self._kind} was not ready within {START_S:g} s: see {self._log}") from None
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            raise BenchError(f"{self._kind} cannot start: {answer['error']} (see {self._log})")
        self._streams = bool(answer["streams"])
        return dict(answer["versions"])

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        message = f"{self._kind} has ended: see {self._log}"
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if isinstance(answer, dict):
                message = str(answer["error"])
                break
            for number, count, done in answer:
                self._note(number, count, done)
        for pending in self._pending.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                pending.done.set_exception(RequestFailed("PEER-DIED", message))

    def _note(self, number: int, count: int, done: bool) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return  # timed out
        pending.outcome.add_tokens(count)
        if done and not pending.done.done():
            pending.done.set_result(None)
