import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from redis import exceptions

from tidewheel_client.errors import RequestError
from tidewheel_queue.redis_endpoint import QueueNames, RedisEndpoint, heeding_cancels, is_lost

T = TypeVar("T")
R = TypeVar("R")
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_LOST_ONES = (exceptions.ConnectionError, exceptions.TimeoutError)


class TakenJob(NamedTuple):
    id: str
    attempt: int  # unique within the job
    age_ms: float  # at the take
    payload: str


class StreamChunk(NamedTuple):
    id: str
    attempt: int
    number: int  # within the attempt, from 1
    text: str


class FinishedJob(NamedTuple):
    id: str
    state: str
    result: str  # JSON

    @classmethod
    def of(cls, job_id: str, state: str, **result: Any) -> "FinishedJob":
        return cls(job_id, state, json.dumps(result, separators=(",", ":")))


@dataclass(eq=False)
class WorkerStore:
    """Worker's access to the queue. Calls wait while Redis is away, and are repeated, except `take`.

    If its answer is lost, `take` gives back all jobs of this worker but those in `held`, and returns none.
    """

    endpoint: RedisEndpoint
    names: QueueNames
    consumer: str
    max_attempts: int
    note: Callable[[str], None]
    _is_away: bool = field(default=False, init=False)

    async def take(
        self, room: int, held: Iterable[str], *, gone: Mapping[str, str], claim: bool, lowest_first: bool
    ) -> list[TakenJob]:
        """Return up to `room` jobs, within a class those of dead workers first.

        `gone` maps dead workers to their last heartbeats; one with a newer keeps its jobs. `claim`: take also jobs
        that were given back.
        """
        workers = [part for worker in gone.items() for part in worker]
        options = (room, self.max_attempts, int(claim), int(lowest_first))
        try:
            found = await self._once("take", self.consumer, *options, *workers)
        except exceptions.RedisError as error:
            if "NOGROUP" not in str(error):
                await self._away(error, _FIRST_WAIT_S)
            await self.give_back(held)
            return []
        return [TakenJob(*job) for job in found]

    async def finish(self, endings: Sequence[FinishedJob]) -> list[bool]:
        """Write results. Return False for each job that already had one."""
        given = [part for one in endings for part in one]
        return [bool(is_first) for is_first in await self._persistently("finish", *given)]

    async def fail(self, job_id: str, attempt: int, reason: str) -> bool:
        """Count a failed attempt. Return False if the job is dead or lost."""
        given = (job_id, attempt, self.max_attempts, reason)
        return bool(await self._persistently("fail", self.consumer, *given))

    async def beat(self, ids: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Return ids of lost jobs, and other busy workers' counts of heartbeats."""
        lost, others = await self._persistently("beat", self.consumer, *ids)
        return lost, dict(zip(others[::2], others[1::2], strict=True))

    async def emit(self, parts: Sequence[StreamChunk]) -> list[None]:
        await self._persistently("emit", self.consumer, *(field for part in parts for field in part))
        return [None] * len(parts)

    async def give_back(self, kept: Iterable[str] = ()) -> int:
        """Give back all jobs but `kept`; return their number."""
        return int(await self._persistently("give_back", self.consumer, *kept))

    async def leave(self) -> None:
        await self._persistently("leave", self.consumer)

    async def has_jobs(self) -> bool:
        return any((await self._persistently("count"))[:4])

    async def listen(self, on_work: Callable[[], None], on_cancel: Callable[[str], None]) -> None:
        """Call `on_work` and `on_cancel` for the queue's messages; `take` and `beat` make up for lost ones."""
        while True:
            with contextlib.suppress(*_LOST_ONES):
                await heeding_cancels(self._hear_until_lost(on_work, on_cancel))
            await asyncio.sleep(_LONGEST_WAIT_S)

    async def _hear_until_lost(self, on_work: Callable[[], None], on_cancel: Callable[[str], None]) -> None:
        async with self.endpoint.redis.pubsub() as channel:
            await heeding_cancels(channel.subscribe(self.names.bell))
            while True:
                message = await heeding_cancels(
                    channel.get_message(ignore_subscribe_messages=True, timeout=_LONGEST_WAIT_S)
                )
                word, _, job_id = str(message["data"]).partition(" ") if message else ("", "", "")
                if word == "work":
                    on_work()
                elif word == "cancel":
                    on_cancel(job_id)

    async def _persistently(self, script: str, *arguments: Any) -> Any:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._once(script, *arguments)
            except exceptions.RedisError as error:
                await self._away(error, wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _once(self, script: str, *arguments: Any) -> Any:
        answer = await heeding_cancels(self.endpoint.run(script, self.names, *arguments))
        if self._is_away:
            self._is_away = False
            self.note(f"Redis at {self.endpoint.name} answers again")
        return answer

    async def _away(self, error: exceptions.RedisError, wait_s: float) -> None:
        if not is_lost(error):
            raise self.endpoint.error_of(error) from None
        if not self._is_away:
            self._is_away = True
            self.note(f"{self.endpoint.error_of(error)}: trying again")
        with contextlib.suppress(RequestError):  # reported above
            await self.endpoint.revive()
        await asyncio.sleep(wait_s)


class Batcher(Generic[T, R]):
    """Collector of items, written together after the previous write."""

    def __init__(self, write: Callable[[list[T]], Awaitable[Sequence[R]]], most: int = 256) -> None:
        self._write = write
        self._most = most
        self._added: asyncio.Queue[tuple[T, asyncio.Future[R]]] = asyncio.Queue()

    def add(self, item: T) -> asyncio.Future[R]:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._added.put_nowait((item, future))
        return future

    async def run(self) -> None:
        while True:
            batch = [await self._added.get()]
            batch += [self._added.get_nowait() for _ in range(min(self._added.qsize(), self._most - 1))]
            answers = await self._write([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # its task may be cancelled
                    future.set_result(answer)


class SilenceWatch:
    """Detector of dead workers: `most_equal` looks in a row find no new heartbeat.

    Looks are counted, not time: a set clock or a pause makes no worker dead.
    """

    def __init__(self, most_equal: int) -> None:
        self._most_equal = most_equal
        self._repeats: dict[tuple[str, str], int] = {}  # by worker and heartbeat

    def look(self, beats: Mapping[str, str]) -> dict[str, str]:
        """Return the heartbeats of the dead workers."""
        self._repeats = {one: self._repeats.get(one, -1) + 1 for one in beats.items()}
        return {worker: beat for (worker, beat), times in self._repeats.items() if times >= self._most_equal}
