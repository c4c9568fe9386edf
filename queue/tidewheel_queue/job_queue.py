from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from tidewheel_client.errors import RequestTimeout
from tidewheel_client.facade import Facade, blocking, iterating, run
from tidewheel_queue import queue_calls as calls
from tidewheel_queue.jobs import MAX_JOB_BYTES, DeadJob, EnqueuedJob, Job, JobCounts, Result, TextChunk, pack
from tidewheel_queue.lua_scripts import SCRIPTS
from tidewheel_queue.redis_endpoint import BlockingRedisEndpoint, RedisEndpoint

BOUND = 10_000
RESULT_TTL_S = 86_400.0


class AsyncQueue:
    """`Queue` of an event loop, opened by `async with` or `await queue.open()`."""

    _endpoint_type: ClassVar[type[RedisEndpoint]] = RedisEndpoint

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

    async def open(self, /) -> Self:
        """Connect. Raise `ServerUnavailable`, or `Unsupported` before Redis 6.2."""
        self._endpoint = await self._endpoint_type.open(self._where)
        self._redis = self._endpoint.redis
        try:
            self._endpoint.check_version(await self._call(self._redis.info))
        except BaseException:
            await self._endpoint.close()
            raise
        self._scripts = {name: self._redis.register_script(text) for name, text in SCRIPTS.items()}
        return self

    async def enqueue(self, /, job: Job | Mapping[str, object] | None = None, **fields: Any) -> EnqueuedJob:
        """Add a job unless its id is known. Raise `Busy` at the bound."""
        return (await self.enqueue_many([fields if job is None else job]))[0]

    async def enqueue_many(self, /, jobs: Iterable[Job | Mapping[str, object]]) -> list[EnqueuedJob]:
        """Check all jobs, then add them in groups of up to 500.

        A group is added whole or refused with `Busy`; earlier groups stay. Repeated ids are safe.
        """
        packed = [pack(job, self._limits.max_job_bytes) for job in jobs]
        enqueued: list[EnqueuedJob] = []
        for piece in calls.pieces(packed):
            answer = await self._run("enqueue", calls.enqueue_arguments(self._names, self._limits, piece))
            enqueued += calls.read_enqueued(self._names, self._limits, piece, answer)
        return enqueued

    async def result(self, /, job_id: str, *, wait_s: float = 0.0) -> Result:
        """Return the job's state and result.

        Raise `NotFound`, or `RequestTimeout` if a `wait_s` above 0 passes before the job ends.
        """
        end = time.monotonic() + wait_s
        last = await self._last_ended() if wait_s else ""
        result = await self._look(job_id)
        while wait_s and not result.has_ended:
            left_ms = int(1000 * (end - time.monotonic()))
            if left_ms <= 0:
                raise RequestTimeout(f"job {job_id!r} is {result.state} after {wait_s:g} s")
            entries = await self._read(self._names.ended, last, min(left_ms, calls.BLOCK_MS))
            last = entries[-1][0] if entries else last
            if not entries or any(fields["id"] == job_id for _, fields in entries):
                result = await self._look(job_id)
        return result

    async def results(self, /, *, follow: bool = False) -> AsyncIterator[Result]:
        """Yield the kept results, oldest first, with `follow` also new ones, without end."""
        last = "0-0"
        while True:
            entries = await self._read(self._names.ended, last, calls.BLOCK_MS if follow else None)
            for entry, fields in entries:
                last = entry
                found = await self._fields(fields["id"])
                if found[0] is not None:
                    yield calls.read_result(self._names, fields["id"], found)
            if not entries and not follow:
                return

    async def tokens(self, /, job_id: str) -> AsyncIterator[TextChunk]:
        """Yield the text of a job with `stream` until the job ends. Raise `NotFound`."""
        last, stream = "0-0", self._names.tokens(job_id)
        while True:
            has_ended = (await self._look(job_id)).has_ended
            for entry, fields in await self._read(stream, last, None if has_ended else calls.BLOCK_MS):
                last = entry
                if "end" in fields:
                    return
                yield TextChunk(fields["text"], int(fields["attempt"]))
            if has_ended and not await self._read(stream, last, None):
                return

    async def cancel(self, /, job_id: str) -> bool:
        """Cancel a job. Return False if it had ended. Raise `NotFound`."""
        self._names.job(job_id)
        return calls.read_cancelled(self._names, job_id, await self._run("cancel", [self._names.prefix, job_id]))

    async def counts(self, /) -> JobCounts:
        return calls.read_counts(await self._run("count", [self._names.prefix]))

    async def dead(self, /, limit: int = 1000) -> list[DeadJob]:
        """Return the jobs given up last, newest first."""
        return calls.read_dead(await self._call(lambda: self._redis.xrevrange(self._names.dead, count=limit)))

    async def close(self, /) -> None:
        """Close the connection; an embedded Redis ends after its last user."""
        await self._endpoint.close()

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
        return list(await self._call(lambda: self._redis.hmget(key, calls.RESULT_FIELDS)))

    async def _last_ended(self) -> str:
        found = await self._call(lambda: self._redis.xrevrange(self._names.ended, count=1))
        return str(found[0][0]) if found else "0-0"

    async def _read(self, stream: str, last: str, block_ms: int | None) -> list[tuple[str, dict[str, str]]]:
        answer = await self._call(lambda: self._redis.xread({stream: last}, count=calls.READ_COUNT, block=block_ms))
        return list(answer[0][1]) if answer else []

    async def _run(self, script: str, arguments: list[str]) -> Any:
        return await self._call(lambda: self._scripts[script](keys=self._names.keys, args=arguments))

    async def _call(self, command: Callable[[], Any]) -> Any:
        return await self._endpoint.call(command)


class _BlockingQueue(AsyncQueue):
    _endpoint_type = BlockingRedisEndpoint


class Queue(Facade[AsyncQueue]):
    """Jobs that wait in Redis for a worker, and their results. Threads may share one.

    `where` is a folder, whose embedded Redis runs while a process uses it, or the URL of a Redis from 6.2 on. Errors
    are those of a `Client`: `Busy` at the bound, `InvalidRequest` for a bad job, `ServerUnavailable` without a Redis.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        name: str = "default",
        bound: int = BOUND,  # jobs that wait or run
        max_job_bytes: int = MAX_JOB_BYTES,
        result_ttl_s: float = RESULT_TTL_S,
    ) -> None:
        core = _BlockingQueue(where, name=name, bound=bound, max_job_bytes=max_job_bytes, result_ttl_s=result_ttl_s)
        super().__init__(run(core.open()))

    def __enter__(self) -> Self:
        return self

    enqueue = blocking(AsyncQueue.enqueue)
    enqueue_many = blocking(AsyncQueue.enqueue_many)
    result = blocking(AsyncQueue.result)
    results = iterating(AsyncQueue.results)
    tokens = iterating(AsyncQueue.tokens)
    cancel = blocking(AsyncQueue.cancel)
    counts = blocking(AsyncQueue.counts)
    dead = blocking(AsyncQueue.dead)
    close = blocking(AsyncQueue.close)
