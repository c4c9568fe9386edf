import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.bench import BenchError, peer_engines
from tidewheel.bench.outcome import OfferedRequest, RequestFailed, RequestOutcome
from tidewheel.bench.worker_process import WorkerFailed, WorkerProcess

PROGRAM = Path(peer_engines.__file__)
START_S = 600.0


class _PendingRequest(NamedTuple):
    outcome: RequestOutcome
    done: asyncio.Future[None]


class PeerTransport:
    """Transport to a `peer_engines.py` process that lives from `open` to `close`; its errors go to `log`."""

    can_cancel = False

    def __init__(self, python: str, kind: str, options: Mapping[str, Any], log: Path) -> None:
        self._command = [python, str(PROGRAM), kind, json.dumps(dict(options))]
        self._kind = kind
        self._log = log
        self._process: WorkerProcess | None = None
        self._reader: threading.Thread | None = None
        self._pending: dict[int, _PendingRequest] = {}
        self._num_sent = 0
        self._failure = ""
        self.versions: dict[str, str] = {}

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._process = WorkerProcess(self._kind, self._command, self._log, {"HF_HUB_OFFLINE": "1"})
            answer = await asyncio.to_thread(self._process.receive, START_S)
        except BaseException as error:
            await self.close()
            if isinstance(error, WorkerFailed):
                raise BenchError(f"{error}") from None
            raise
        self.versions = dict(answer["versions"])
        self._reader = threading.Thread(target=self._read, args=(self._process, loop), daemon=True)
        self._reader.start()

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        assert self._process is not None
        if self._failure:
            raise RequestFailed("PEER-DIED", self._failure)
        self._num_sent += 1
        number = self._num_sent
        pending = _PendingRequest(outcome, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            self._process.send({"id": number, "input_ids": list(input_ids), "max_tokens": offered.num_output_tokens})
            await pending.done
        except WorkerFailed as error:
            raise RequestFailed("PEER-DIED", str(error)) from None
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)
        if self._reader is not None:
            self._reader.join()

    def _read(self, process: WorkerProcess, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                while True:
                    loop.call_soon_threadsafe(self._note, process.receive())
            except WorkerFailed as error:
                loop.call_soon_threadsafe(self._fail, str(error))

    def _note(self, events: list[peer_engines.Event]) -> None:
        for number, count, done in events:
            pending = self._pending.get(number)
            if pending is None:
                continue  # timed out
            pending.outcome.add_tokens(count)
            if done and not pending.done.done():
                pending.done.set_result(None)

    def _fail(self, message: str) -> None:
        self._failure = message
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(RequestFailed("PEER-DIED", message))
