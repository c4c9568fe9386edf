from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidewheel_client.errors import RequestTimeout
from tidewheel_client.queue import queue_calls as calls
from tidewheel_client.queue.job_queue import BOUND, RESULT_TTL_S
from tidewheel_client.queue.jobs import MAX_JOB_BYTES, Chunked, Counts, DeadJob, Enqueued, Job, Result, pack
from tidewheel_client.queue.redis_place import RedisPlace, patiently_async


class AsyncQueue:
    """`Queue` of one event loop, with the same arguments, opened by `async with` or `await queue.open()`."""

    def __init__(
        self,
        where: str | Path,
        *,
        name: str = "default",
        bound: int = BOUND,
        max_job_bytes: int = MAX_JOB_BYTES,
        result_ttl_s: float = RESULT_TTL_S,
    ) -> None:
        self._names = calls.QueueNames(name)
        self._limits = calls.QueueLimits(bound, max_job_bytes, result_ttl_s)
        self._where = where

    async def open(self) -> Self:
        """Connect. Raise `ServerUnavailable`, and `Unsupported` for an older Redis."""
        self._place = await asyncio.to_thread(RedisPlace, self._where)
        try:
            self._redis = self._place.connect_async()
            self._place.check_version(await self._patiently(self._redis.info))
        except BaseException:
            self._place.close()
            raise
        self._scripts = {name: self._redis.register_script(text) for name, text in calls.SCRIPTS.items()}
        return self

    async def enqueue(self, job: Job | Mapping[str, object] | None = None, **fields: Any) -> Enqueued:
        """Add a job, or its fields. A job whose id is known is not added again. Raise `Busy` at the bound."""
        return (await self.enqueue_many([fields if job is None else job]))[0]

    async def enqueue_many(self, jobs: Iterable[Job | Mapping[str, object]]) -> list[Enqueued]:
        """Add jobs in groups of up to 500, once all are found to be right.

        A group is added whole, or refused with `Busy`; groups before it stay. To repeat the call with the same ids is
        harmless.
        """
        packed = [pack(job, self._limits.max_job_bytes) for job in jobs]
        enqueued: list[Enqueued] = []
        for piece in calls.pieces(packed):
            answer = await self._run("enqueue", calls.enqueue_arguments(self._names, self._limits, piece))
            enqueued += calls.read_enqueued(self._names, self._limits, piece, answer)
        return enqueued

    async def result(self, job_id: str, *, wait_s: float = 0.0) -> Result:
        """Return the job's state, and its result once it has ended.

        Raise `NotFound`, and `RequestTimeout` if it has not ended after `wait_s`, unless that is 0.
        """
        end = time.monotonic() + wait_s
        last = await self._last_ended() if wait_s else ""
        result = await self._look(job_id)
        while wait_s and not result.has_ended:
            left_ms = int(1000 * (end - time.monotonic()))
            if left_ms <= 0:
                raise RequestTimeout(f"job {job_id!r} is {result.state} after {wait_s:g} s")
            news = await self._read(self._names.ended, last, min(left_ms, calls.BLOCK_MS))
            last = news[-1][0] if news else last
            if not news or any(fields["id"] == job_id for _, fields in news):
                result = await self._look(job_id)
        return result

    async def results(self, *, follow: bool = False) -> AsyncIterator[Result]:
        """Yield the results that are kept, oldest first; with `follow` new ones too, without end."""
        last = "0-0"
        while True:
            news = await self._read(self._names.ended, last, calls.BLOCK_MS if follow else None)
            for entry, fields in news:
                last = entry
                found = await self._fields(fields["id"])
                if found[0] is not None:
                    yield calls.read_result(self._names, fields["id"], found)
            if not news and not follow:
                return

    async def tokens(self, job_id: str) -> AsyncIterator[Chunked]:
        """Yield the text of a job with `stream` as it comes, until the job ends. Raise `NotFound`."""
        last, stream = "0-0", self._names.tokens(job_id)
        while True:
            has_ended = (await self._look(job_id)).has_ended
            for entry, fields in await self._read(stream, last, None if has_ended else calls.BLOCK_MS):
                last = entry
                if "end" in fields:
                    return
                yield Chunked(fields["text"], int(fields["attempt"]))
            if has_ended and not await self._read(stream, last, None):
                return

    async def cancel(self, job_id: str) -> bool:
        """End a job that waits or runs. Return False if it had ended. Raise `NotFound`."""
        self._names.job(job_id)
        return calls.read_cancelled(self._names, job_id, await self._run("cancel", [self._names.prefix, job_id]))

    async def counts(self) -> Counts:
        return calls.read_counts(await self._run("count", [self._names.prefix]))

    async def dead(self, limit: int = 1000) -> list[DeadJob]:
        """Return the last jobs that were given up, newest first."""
        return calls.read_dead(await self._patiently(lambda: self._redis.xrevrange(self._names.dead, count=limit)))

    async def close(self) -> None:
        """Close the connection. An embedded Redis ends when its last user has."""
        await self._redis.aclose()
        self._place.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _look(self, job_id: str) -> Result:
        return calls.read_result(self._names, job_id, await self._fields(job_id))

    async def _fields(self, job_id: str) -> list[str | None]:
        key = self._names.job(job_id)
        return list(await self._patiently(lambda: self._redis.hmget(key, calls.RESULT_FIELDS)))

    async def _last_ended(self) -> str:
        found = await self._patiently(lambda: self._redis.xrevrange(self._names.ended, count=1))
        return str(found[0][0]) if found else "0-0"

    async def _read(self, stream: str, last: str, block_ms: int | None) -> list[tuple[str, dict[str, str]]]:
        return calls.new_entries(
            await self._patiently(lambda: self._redis.xread({stream: last}, count=calls.READ_COUNT, block=block_ms))
        )

    async def _run(self, script: str, arguments: list[str]) -> Any:
        return await self._patiently(lambda: self._scripts[script](keys=self._names.keys, args=arguments))

    async def _patiently(self, call: Callable[[], Awaitable[Any]]) -> Any:
        return await patiently_async(self._place, call)
