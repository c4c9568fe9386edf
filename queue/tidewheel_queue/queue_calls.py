from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tidewheel_client.errors import Busy, InvalidRequest, NotFound
from tidewheel_queue.jobs import (
    CLASSES,
    MAX_JOB_BYTES,
    DeadJob,
    EnqueuedJob,
    JobCounts,
    PackedJob,
    Result,
    check_id,
    unpack,
)

BLOCK_MS = 1000  # of a waiting read
READ_COUNT = 1000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PIECE_JOBS, _PIECE_BYTES = 500, 4 << 20  # of one script, which blocks Redis
_RETRY_AFTER_MS = 1000


class QueueNames:
    """Keys of a queue, on one node of a Redis cluster by their braces."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"queue name {name!r}: 1 to 64 characters of A-Z a-z 0-9 . _ - are allowed")
        self.name = name
        self.prefix = f"tidewheel:{{{name}}}:"
        self.ended = f"{self.prefix}ended"
        self.dead = f"{self.prefix}dead"
        self.bell = f"{self.prefix}bell"
        self.keys = [*(self.prefix + name for name in CLASSES), self.ended, self.dead, f"{self.prefix}idle"]

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{check_id(job_id)}"

    def tokens(self, job_id: str) -> str:
        return f"{self.prefix}tokens:{check_id(job_id)}"


class QueueLimits:
    def __init__(self, bound: int, max_job_bytes: int, result_ttl_s: float) -> None:
        if not 1 <= bound <= 10_000_000:
            raise InvalidRequest(f"bound is {bound}: 1 to 10000000 jobs")
        if not 1 <= max_job_bytes <= 64 * MAX_JOB_BYTES:
            raise InvalidRequest(f"max_job_bytes is {max_job_bytes}: 1 to {64 * MAX_JOB_BYTES}")
        if not 1 <= result_ttl_s <= 30 * 86_400:
            raise InvalidRequest(f"result_ttl_s is {result_ttl_s}: 1 to {30 * 86_400} seconds")
        self.bound = bound
        self.max_job_bytes = max_job_bytes
        self.ttl_ms = int(result_ttl_s * 1000)


def pieces(jobs: Sequence[PackedJob]) -> Iterator[list[PackedJob]]:
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


def enqueue_arguments(names: QueueNames, limits: QueueLimits, piece: Iterable[PackedJob]) -> list[str]:
    given = [names.prefix, str(limits.bound), str(limits.ttl_ms)]
    for job in piece:
        given += [job.id, str(job.class_number), job.payload, "1" if job.stream else "0"]
    return given


def read_enqueued(
    names: QueueNames, limits: QueueLimits, piece: Sequence[PackedJob], answer: list[int]
) -> list[EnqueuedJob]:
    """Raise `Busy` for a refused piece."""
    before, *added = answer
    if len(added) != len(piece):
        raise Busy(
            f"queue {names.name!r} holds {before} jobs that wait or run, and {len(piece)} more would pass its bound "
            f"of {limits.bound}: none of them was taken",
            retry_after_ms=_RETRY_AFTER_MS,
        )
    return [EnqueuedJob(job.id, bool(is_new)) for job, is_new in zip(piece, added, strict=True)]


RESULT_FIELDS = ("state", "attempts", "result")


def read_result(names: QueueNames, job_id: str, found: Sequence[str | None]) -> Result:
    """Raise `NotFound`."""
    state, attempts, result = found
    if state is None:
        raise NotFound(f"queue {names.name!r} has no job {job_id!r}: unknown, or its time to live is over")
    answer: dict[str, Any] = json.loads(result) if result else {}
    error, tag = answer.pop("error", None), answer.pop("tag", None)
    return Result(
        id=job_id, state=state, attempts=int(attempts or 0), answer=answer or None, error=error, tag=tag
    )  # fmt: skip


def read_cancelled(names: QueueNames, job_id: str, answer: int) -> bool:
    """Raise `NotFound`."""
    if answer < 0:
        raise NotFound(f"queue {names.name!r} has no job {job_id!r}: unknown, or its time to live is over")
    return answer == 1


def read_counts(answer: Sequence[int]) -> JobCounts:
    *_, dead = answer
    running = tuple(answer[4:8])
    return JobCounts(tuple(total - runs for total, runs in zip(answer[:4], running, strict=True)), running, dead)


def read_dead(entries: Iterable[tuple[str, dict[str, str]]]) -> list[DeadJob]:
    return [
        DeadJob(found["id"], found["reason"], int(found["attempts"]), unpack(found["job"])) for _, found in entries
    ]
