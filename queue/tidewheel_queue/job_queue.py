import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from tidewheel_client.errors import Busy, InvalidRequest, NotFound, RequestTimeout
from tidewheel_client.facade import Facade, blocking, facing, iterate, run, signed_as
from tidewheel_queue.jobs import DeadJob, EnqueuedJob, Job, JobCounts, PackedJob, Result, TextChunk, check_id
from tidewheel_queue.redis_endpoint import BlockingRedisEndpoint, QueueNames, RedisEndpoint

BOUND = 10_000
RESULT_TTL_S = 86_400.0
_BLOCK_MS = 1000  # of a waiting read
_READ_COUNT = 1000
_PIECE_JOBS, _PIECE_BYTES = 500, 4 << 20  # of one script, which blocks Redis
_RETRY_AFTER_MS = 1000


class AsyncQueue:
    """`Queue` for one event loop, opened by `async with` or `await queue.open()`."""

    _endpoint_type: ClassVar[type[RedisEndpoint]] = RedisEndpoint

    def __init__(
        self,
        where: str | Path,
        *,
        name: str = "default",
        bound: int = BOUND,  # jobs that wait or run
        result_ttl_s: float = RESULT_TTL_S,
    ) -> None:
        self._names = QueueNames(name)
        for limit, value, most, unit in (
            ("bound", bound, 10_000_000, " jobs"),
            ("result_ttl_s", result_ttl_s, 30 * 86_400, " seconds"),
        ):
            if not 1 <= value <= most:
                raise InvalidRequest(f"{limit} is {value}: 1 to {most}{unit}")
        self._bound, self._ttl_ms = bound, int(result_ttl_s * 1000)
        self._where = where

    async def open(self, /) -> Self:
        """Connect. Raise `ServerUnavailable`, or `Unsupported` before Redis 6.2."""
        self._endpoint = await self._endpoint_type.open(self._where)
        self._redis, self._call = self._endpoint.redis, self._endpoint.call
        return self

    async def enqueue(self, /, job: Job | Mapping[str, object] | None = None, **fields: Any) -> EnqueuedJob:
        """Add a job unless its id is known. Raise `Busy` if the queue is full."""
        return (await self.enqueue_many([fields if job is None else job]))[0]

    async def enqueue_many(self, /, jobs: Iterable[Job | Mapping[str, object]]) -> list[EnqueuedJob]:
        """Check all jobs, then add them in groups of up to 500.

        A group is added whole or refused with `Busy`; earlier groups stay. Repeated ids are safe.
        """
        packed = [PackedJob.of(job) for job in jobs]
        enqueued: list[EnqueuedJob] = []
        for piece in _pieces(packed):
            fields = [field for job in piece for field in job]
            before, *added = await self._run("enqueue", self._bound, self._ttl_ms, *fields)
            if len(added) != len(piece):
                raise Busy(
                    f"queue {self._names.name!r} holds {before} jobs that wait or run, and {len(piece)} more would "
                    f"pass its bound of {self._bound}: none of them was taken",
                    retry_after_ms=_RETRY_AFTER_MS,
                )
            enqueued += [EnqueuedJob(job.id, bool(is_new)) for job, is_new in zip(piece, added, strict=True)]
        return enqueued

    async def result(self, /, job_id: str, *, wait_s: float = 0.0) -> Result:
        """Return a job. Raise `NotFound`, or `RequestTimeout` if a `wait_s` above 0 passes before the job ends."""
        end = time.monotonic() + wait_s
        last = await self._last_ended() if wait_s else ""
        result = await self._look(job_id)
        while wait_s and not result.has_ended:
            left_ms = int(1000 * (end - time.monotonic()))
            if left_ms <= 0:
                raise RequestTimeout(f"job {job_id!r} is {result.state} after {wait_s:g} s")
            entries = await self._read(self._names.ended, last, min(left_ms, _BLOCK_MS))
            last = entries[-1][0] if entries else last
            if not entries or any(fields["id"] == job_id for _, fields in entries):
                result = await self._look(job_id)
        return result

    async def results(self, /, *, follow: bool = False) -> AsyncIterator[Result]:
        """Yield the stored results, oldest first; with `follow` also new results, without end."""
        last = "0-0"
        while True:
            entries = await self._read(self._names.ended, last, _BLOCK_MS if follow else None)
            for entry, fields in entries:
                last = entry
                with contextlib.suppress(NotFound):
                    yield await self._look(fields["id"])
            if not entries and not follow:
                return

    async def tokens(self, /, job_id: str) -> AsyncIterator[TextChunk]:
        """Yield the text of a job that has `stream`, until the job ends. Raise `NotFound`."""
        last, stream = "0-0", self._names.tokens(job_id)
        while True:
            has_ended = (await self._look(job_id)).has_ended
            for entry, fields in await self._read(stream, last, None if has_ended else _BLOCK_MS):
                last = entry
                if "end" in fields:
                    return
                yield TextChunk(fields["text"], int(fields["attempt"]))
            if has_ended and not await self._read(stream, last, None):
                return

    async def cancel(self, /, job_id: str) -> bool:
        """Cancel a job. Return False if the job had ended. Raise `NotFound`."""
        check_id(job_id)
        answer = await self._run("cancel", job_id)
        if answer < 0:
            raise self._unknown(job_id)
        return bool(answer)

    async def counts(self, /) -> JobCounts:
        *totals, dead = await self._run("count")
        running = tuple(totals[4:])
        return JobCounts(tuple(total - runs for total, runs in zip(totals[:4], running, strict=True)), running, dead)

    async def dead(self, /, limit: int = 1000) -> list[DeadJob]:
        """Return jobs given up after too many attempts, newest first."""
        entries = await self._call(lambda: self._redis.xrevrange(self._names.dead, count=limit))
        return [
            DeadJob(found["id"], found["reason"], int(found["attempts"]), Job.of_payload(found["job"]))
            for _, found in entries
        ]

    async def close(self, /) -> None:
        """Close the connection; an embedded Redis ends after its last user."""
        await self._endpoint.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _look(self, job_id: str) -> Result:
        key = self._names.job(job_id)
        state, attempts, found = await self._call(lambda: self._redis.hmget(key, "state", "attempts", "result"))
        if state is None:
            raise self._unknown(job_id)
        answer: dict[str, Any] = json.loads(found or "{}")
        error, tag = answer.pop("error", None), answer.pop("tag", None)
        return Result(
            id=job_id, state=state, attempts=int(attempts or 0), answer=answer or None, error=error, tag=tag
        )

    def _unknown(self, job_id: str) -> NotFound:
        return NotFound(f"queue {self._names.name!r} has no job {job_id!r}: unknown, or its time to live is over")

    async def _last_ended(self) -> str:
        found = await self._call(lambda: self._redis.xrevrange(self._names.ended, count=1))
        return str(found[0][0]) if found else "0-0"

    async def _read(self, stream: str, last: str, block_ms: int | None) -> list[tuple[str, dict[str, str]]]:
        answer = await self._call(lambda: self._redis.xread({stream: last}, count=_READ_COUNT, block=block_ms))
        return list(answer[0][1]) if answer else []

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._call(lambda: self._endpoint.run(script, self._names, *arguments))


def _pieces(jobs: Sequence[PackedJob]) -> Iterator[list[PackedJob]]:
    piece: list[PackedJob] = []
    size = 0
    for job in jobs:
        if piece and (len(piece) == _PIECE_JOBS or size + len(job.payload) > _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(job)
        size += len(job.payload)
    if piece:
        yield piece


class _BlockingQueue(AsyncQueue):
    _endpoint_type = BlockingRedisEndpoint


class Queue(Facade[AsyncQueue]):
    """Jobs that wait in Redis for a worker, and their results. Threads may share one.

    `where` is a folder, whose embedded Redis runs while in use, or the URL of a Redis from 6.2 on. Errors are a
    `Client`'s: `Busy` if full, `InvalidRequest` for a bad job, `ServerUnavailable` without a Redis.
    """

    @signed_as(AsyncQueue.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(run(_BlockingQueue(*args, **options).open()))

    def __enter__(self) -> Self:
        return self

    enqueue = blocking(AsyncQueue.enqueue)
    enqueue_many = blocking(AsyncQueue.enqueue_many)
    result = blocking(AsyncQueue.result)
    results = facing(AsyncQueue.results, iterate)
    tokens = facing(AsyncQueue.tokens, iterate)
    cancel = blocking(AsyncQueue.cancel)
    counts = blocking(AsyncQueue.counts)
    dead = blocking(AsyncQueue.dead)
    close = blocking(AsyncQueue.close)
