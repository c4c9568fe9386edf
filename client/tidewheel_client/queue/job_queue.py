from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidewheel_client.errors import RequestTimeout
from tidewheel_client.queue import queue_calls as calls
from tidewheel_client.queue.jobs import MAX_JOB_BYTES, Chunked, Counts, DeadJob, Enqueued, Job, Result, pack
from tidewheel_client.queue.redis_place import RedisPlace, patiently

BOUND = 10_000
RESULT_TTL_S = 86_400.0


class Queue:
    """Jobs that wait in Redis for a worker, and their results. Threads may share one.

    with Queue("tidewheel-queue") as queue:
        job = queue.enqueue(prompt="Once upon a time", params={"max_tokens": 64})
        print(queue.result(job.id, wait_s=60).text)

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
        self._names = calls.QueueNames(name)
        self._limits = calls.QueueLimits(bound, max_job_bytes, result_ttl_s)
        self._place = RedisPlace(where)
        try:
            self._redis = self._place.connect()
            self._place.check_version(self._patiently(self._redis.info))
        except BaseException:
            self._place.close()
            raise
        self._scripts = {name: self._redis.register_script(text) for name, text in calls.SCRIPTS.items()}

    def enqueue(self, job: Job | Mapping[str, object] | None = None, **fields: Any) -> Enqueued:
        """Add a job, or its fields. A job whose id is known is not added again. Raise `Busy` at the bound."""
        return self.enqueue_many([fields if job is None else job])[0]

    def enqueue_many(self, jobs: Iterable[Job | Mapping[str, object]]) -> list[Enqueued]:
        """Add jobs in groups of up to 500, once all are found to be right.

        A group is added whole, or refused with `Busy`; groups before it stay. To repeat the call with the same ids is
        harmless.
        """
        packed = [pack(job, self._limits.max_job_bytes) for job in jobs]
        enqueued: list[Enqueued] = []
        for piece in calls.pieces(packed):
            answer = self._run("enqueue", calls.enqueue_arguments(self._names, self._limits, piece))
            enqueued += calls.read_enqueued(self._names, self._limits, piece, answer)
        return enqueued

    def result(self, job_id: str, *, wait_s: float = 0.0) -> Result:
        """Return the job's state, and its result once it has ended.

        Raise `NotFound`, and `RequestTimeout` if it has not ended after `wait_s`, unless that is 0.
        """
        end = time.monotonic() + wait_s
        last = self._last_ended() if wait_s else ""
        result = self._look(job_id)
        while wait_s and not result.has_ended:
            left_ms = int(1000 * (end - time.monotonic()))
            if left_ms <= 0:
                raise RequestTimeout(f"job {job_id!r} is {result.state} after {wait_s:g} s")
            news = self._read(self._names.ended, last, min(left_ms, calls.BLOCK_MS))
            last = news[-1][0] if news else last
            if not news or any(fields["id"] == job_id for _, fields in news):
                result = self._look(job_id)
        return result

    def results(self, *, follow: bool = False) -> Iterator[Result]:
        """Yield the results that are kept, oldest first; with `follow` new ones too, without end."""
        last = "0-0"
        while True:
            news = self._read(self._names.ended, last, calls.BLOCK_MS if follow else None)
            for entry, fields in news:
                last = entry
                found = self._fields(fields["id"])
                if found[0] is not None:
                    yield calls.read_result(self._names, fields["id"], found)
            if not news and not follow:
                return

    def tokens(self, job_id: str) -> Iterator[Chunked]:
        """Yield the text of a job with `stream` as it comes, until the job ends. Raise `NotFound`."""
        last, stream = "0-0", self._names.tokens(job_id)
        while True:
            has_ended = self._look(job_id).has_ended
            for entry, fields in self._read(stream, last, None if has_ended else calls.BLOCK_MS):
                last = entry
                if "end" in fields:
                    return
                yield Chunked(fields["text"], int(fields["attempt"]))
            if has_ended and not self._read(stream, last, None):
                return

    def cancel(self, job_id: str) -> bool:
        """End a job that waits or runs. Return False if it had ended. Raise `NotFound`."""
        self._names.job(job_id)
        return calls.read_cancelled(self._names, job_id, self._run("cancel", [self._names.prefix, job_id]))

    def counts(self) -> Counts:
        return calls.read_counts(self._run("count", [self._names.prefix]))

    def dead(self, limit: int = 1000) -> list[DeadJob]:
        """Return the last jobs that were given up, newest first."""
        return calls.read_dead(self._patiently(lambda: self._redis.xrevrange(self._names.dead, count=limit)))

    def close(self) -> None:
        """Close the connection. An embedded Redis ends when its last user has."""
        self._redis.close()
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self, job_id: str) -> Result:
        return calls.read_result(self._names, job_id, self._fields(job_id))

    def _fields(self, job_id: str) -> list[str | None]:
        key = self._names.job(job_id)
        return list(self._patiently(lambda: self._redis.hmget(key, calls.RESULT_FIELDS)))

    def _last_ended(self) -> str:
        found = self._patiently(lambda: self._redis.xrevrange(self._names.ended, count=1))
        return str(found[0][0]) if found else "0-0"

    def _read(self, stream: str, last: str, block_ms: int | None) -> list[tuple[str, dict[str, str]]]:
        return calls.new_entries(
            self._patiently(lambda: self._redis.xread({stream: last}, count=calls.READ_COUNT, block=block_ms))
        )

    def _run(self, script: str, arguments: list[str]) -> Any:
        return self._patiently(lambda: self._scripts[script](keys=self._names.keys, args=arguments))

    def _patiently(self, call: Callable[[], Any]) -> Any:
        return patiently(self._place, call)
