"""Scripts of one queue with their arguments, and readers of what comes back, for clients and workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tidewheel_client.errors import Busy, InvalidRequest, NotFound
from tidewheel_client.queue import lua_scripts
from tidewheel_client.queue.jobs import (
    CLASSES,
    MAX_JOB_BYTES,
    Counts,
    DeadJob,
    Enqueued,
    Packed,
    Result,
    check_id,
    unpack,
)

BLOCK_MS = 1000  # of a read that waits for news
READ_COUNT = 1000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PIECE_JOBS, _PIECE_BYTES = 500, 4 << 20  # that one script enqueues: Redis serves nothing else in the meantime
_RETRY_AFTER_MS = 1000


class QueueNames:
    """Keys of a queue. The braces keep them on one node of a cluster."""

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
    """Limits of what one client puts into a queue."""

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


def pieces(jobs: Sequence[Packed]) -> Iterator[list[Packed]]:
    """Yield the jobs in groups, each of which is enqueued whole or not at all."""
    piece: list[Packed] = []
    size = 0
    for job in jobs:
        if piece and (len(piece) == _PIECE_JOBS or size + len(job.payload) > _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(job)
        size += len(job.payload)
    if piece:
        yield piece


def enqueue_arguments(names: QueueNames, limits: QueueLimits, piece: Iterable[Packed]) -> list[str]:
    given = [names.prefix, str(limits.bound), str(limits.ttl_ms)]
    for job in piece:
        given += [job.id, str(job.class_number), job.payload, "1" if job.stream else "0"]
    return given


def read_enqueued(
    names: QueueNames, limits: QueueLimits, piece: Sequence[Packed], answer: list[int]
) -> list[Enqueued]:
    """Raise `Busy` if the piece was refused."""
    before, *news = answer
    if len(news) != len(piece):
        raise Busy(
            f"queue {names.name!r} holds {before} jobs that wait or run, and {len(piece)} more would pass its bound "
            f"of {limits.bound}: none of them was taken",
            retry_after_ms=_RETRY_AFTER_MS,
        )
    return [Enqueued(job.id, bool(is_new)) for job, is_new in zip(piece, news, strict=True)]


RESULT_FIELDS = ("state", "attempts", "result")


def read_result(names: QueueNames, job_id: str, found: Sequence[str | None]) -> Result:
    """Return what the fields of a job's hash say. Raise `NotFound`."""
    state, attempts, result = found
    if state is None:
        raise NotFound(f"queue {names.name!r} has no job {job_id!r}: unknown, or its time to live is over")
    ending: dict[str, Any] = json.loads(result) if result else {}
    error, tag = ending.pop("error", None), ending.pop("tag", None)
    return Result(
        id=job_id, state=state, attempts=int(attempts or 0), answer=ending or None, error=error, tag=tag
    )  # fmt: skip


def read_cancelled(names: QueueNames, job_id: str, answer: int) -> bool:
    """Raise `NotFound`."""
    if answer < 0:
        raise NotFound(f"queue {names.name!r} has no job {job_id!r}: unknown, or its time to live is over")
    return answer == 1


def read_counts(answer: Sequence[int]) -> Counts:
    *_, dead = answer
    running = tuple(answer[4:8])
    return Counts(tuple(total - runs for total, runs in zip(answer[:4], running, strict=True)), running, dead)


def read_dead(entries: Iterable[tuple[str, dict[str, str]]]) -> list[DeadJob]:
    return [
        DeadJob(found["id"], found["reason"], int(found["attempts"]), unpack(found["job"])) for _, found in entries
    ]


def new_entries(answer: Any) -> list[tuple[str, dict[str, str]]]:
    """Return id and fields of each entry that XREAD of one stream brought."""
    return list(answer[0][1]) if answer else []


SCRIPTS = {
    "enqueue": lua_scripts.ENQUEUE,
    "cancel": lua_scripts.CANCEL,
    "count": lua_scripts.COUNT,
    "take": lua_scripts.TAKE,
    "finish": lua_scripts.FINISH,
    "fail": lua_scripts.FAIL,
    "beat": lua_scripts.BEAT,
    "give_back": lua_scripts.GIVE_BACK,
    "leave": lua_scripts.LEAVE,
    "emit": lua_scripts.EMIT,
}
