from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis import exceptions

from tidewheel_client.errors import RequestError
from tidewheel_client.queue import queue_calls as calls
from tidewheel_client.queue.redis_place import RedisPlace, heeding_cancels, is_lost

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0


class Taken(NamedTuple):
    """Job that this worker holds."""

    id: str
    attempt: int  # its number, which no other of the job has
    age_ms: float  # when it was taken
    payload: str


class Part(NamedTuple):
    """Piece of a job's token stream."""

    id: str
    attempt: int
    number: int  # within the attempt, from 1 on
    text: str


class Ending(NamedTuple):
    id: str
    state: str
    result: str  # JSON


def ending(job_id: str, state: str, **result: Any) -> Ending:
    return Ending(job_id, state, json.dumps(result, separators=(",", ":")))


class WorkerStore:
    """Store that a worker reads and writes. Calls wait for a Redis that is away, and are tried again.

    All may be repeated but `take`: a lost answer leaves jobs in this worker's name, so it gives back what is not in
    `held` before it tries again.
    """

    def __init__(
        self,
        place: RedisPlace,
        names: calls.QueueNames,
        consumer: str,
        max_attempts: int,
        note: Callable[[str], None],
    ) -> None:
        self._place = place
        self._names = names
        self._own = [names.prefix, consumer]
        self._max_attempts = str(max_attempts)
        self._note = note
        self._redis = place.connect_async()
        self._scripts = {name: self._redis.register_script(text) for name, text in calls.SCRIPTS.items()}
        self._is_away = False

    async def check(self) -> None:
        """Raise `RequestError` unless a Redis answers that fits."""
        try:
            info = await heeding_cancels(self._redis.info())
        except exceptions.RedisError as error:
            raise self._place.error_of(error) from None
        self._place.check_version(info)
        if not info.get("aof_enabled"):
            self._note(f"Redis at {self._place.shown} writes no append-only file: jobs are lost when it ends")

    async def take(
        self, room: int, held: Iterable[str], *, gone: Mapping[str, str], claim: bool, lowest_first: bool
    ) -> list[Taken]:
        """Return up to `room` jobs, first those of the dead workers in `gone`.

        `gone` has the last heartbeat by worker: a worker that has written another one since keeps its jobs. With
        `claim`, jobs that were given back are taken too.
        """
        given = [*self._own, str(room), self._max_attempts, str(int(claim)), str(int(lowest_first))]
        given += [part for worker in gone.items() for part in worker]
        try:
            found = await self._once("take", given)
        except exceptions.RedisError as error:
            if "NOGROUP" not in str(error):
                await self._away(error, _FIRST_WAIT_S)
            await self.give_back(held)
            return []
        return [Taken(job_id, attempt, age_ms, payload) for job_id, attempt, age_ms, payload in found]

    async def finish(self, endings: Sequence[Ending]) -> list[bool]:
        """Write the results and acknowledge. Return False for a job that had a result."""
        given = [part for one in endings for part in one]
        return [bool(is_first) for is_first in await self._persistently("finish", [self._names.prefix, *given])]

    async def fail(self, job_id: str, attempt: int, reason: str) -> bool:
        """Count a failed attempt. Return False if the job is dead now, or not this worker's."""
        given = [*self._own, job_id, str(attempt), self._max_attempts, reason]
        return bool(await self._persistently("fail", given))

    async def beat(self, ids: Iterable[str]) -> tuple[list[str], dict[str, str]]:
        """Write this worker's heartbeat.

        Return the ids of the jobs that it has lost, and the heartbeats of the other workers that hold jobs.
        """
        lost, others = await self._persistently("beat", [*self._own, *ids])
        return lost, dict(zip(others[::2], others[1::2], strict=True))

    async def emit(self, parts: Sequence[Part]) -> list[None]:
        """Add to the token streams of jobs."""
        await self._persistently("emit", [*self._own, *(str(field) for part in parts for field in part)])
        return [None] * len(parts)

    async def give_back(self, kept: Iterable[str] = ()) -> int:
        """Give back all jobs in this worker's name but those; return how many."""
        return int(await self._persistently("give_back", [*self._own, *kept]))

    async def leave(self) -> None:
        await self._persistently("leave", self._own)

    async def has_jobs(self) -> bool:
        """Return whether any job of the queue waits or runs."""
        counts = calls.read_counts(await self._persistently("count", [self._names.prefix]))
        return any((*counts.waiting, *counts.running))

    async def listen(self, on_work: Callable[[], None], on_cancel: Callable[[str], None]) -> None:
        """Call `on_work` and `on_cancel` for messages, until cancelled. `take` and `beat` find missed ones."""
        while True:
            with contextlib.suppress(*_LOST_ONES):
                await heeding_cancels(self._hear_until_lost(on_work, on_cancel))
            await asyncio.sleep(_LONGEST_WAIT_S)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _hear_until_lost(self, on_work: Callable[[], None], on_cancel: Callable[[str], None]) -> None:
        async with self._redis.pubsub() as channel:
            await heeding_cancels(channel.subscribe(self._names.bell))
            while True:
                await self._hear(channel, on_work, on_cancel)

    async def _hear(self, channel: Any, on_work: Callable[[], None], on_cancel: Callable[[str], None]) -> None:
        message = await heeding_cancels(channel.get_message(ignore_subscribe_messages=True, timeout=_LONGEST_WAIT_S))
        word, _, job_id = str(message["data"]).partition(" ") if message else ("", "", "")
        if word == "work":
            on_work()
        elif word == "cancel":
            on_cancel(job_id)

    async def _persistently(self, script: str, arguments: list[str]) -> Any:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._once(script, arguments)
            except exceptions.RedisError as error:
                await self._away(error, wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _once(self, script: str, arguments: list[str]) -> Any:
        called: Awaitable[Any] = self._scripts[script](keys=self._names.keys, args=arguments)
        answer = await heeding_cancels(called)
        if self._is_away:
            self._is_away = False
            self._note(f"Redis at {self._place.shown} answers again")
        return answer

    async def _away(self, error: exceptions.RedisError, wait_s: float) -> None:
        """Wait for a Redis that is away. Raise `RequestError` if waiting does not help."""
        if not is_lost(error):
            raise self._place.error_of(error) from None
        if not self._is_away:
            self._is_away = True
            self._note(f"{self._place.error_of(error)}: trying again")
        with contextlib.suppress(RequestError):  # said above
            await asyncio.to_thread(self._place.revive)
        await asyncio.sleep(wait_s)


_LOST_ONES = (exceptions.ConnectionError, exceptions.TimeoutError)
