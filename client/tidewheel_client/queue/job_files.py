from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tidewheel_client.errors import InvalidRequest, RequestError
from tidewheel_client.queue.jobs import MAX_JOB_BYTES, Packed, check_id, pack, read_json

MAX_FILE_BYTES = 1 << 30


def read_jobs(lines: Iterable[bytes], max_job_bytes: int = MAX_JOB_BYTES) -> list[dict[str, object]]:
    """Return the jobs of JSON lines, each with an id. Raise `InvalidRequest` with the number of the first bad line.

    A line without an id gets one from the content of the file and its own number: the same file gives the same ids.
    """
    seen: dict[str, int] = {}
    jobs: list[dict[str, object]] = []
    unnamed: list[tuple[int, int]] = []  # line number, and place in `jobs`
    digest, size = hashlib.sha256(), 0
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        size += len(line)
        if size > MAX_FILE_BYTES:
            raise InvalidRequest(f"line {number}: a file has at most {MAX_FILE_BYTES} bytes")
        if not line.strip():
            continue
        job, packed = _job_of_line(number, line, max_job_bytes)
        if not job.get("id"):
            unnamed.append((number, len(jobs)))
        elif packed.id in seen:
            raise InvalidRequest(f"line {number}: id {packed.id!r} is that of line {seen[packed.id]} too")
        else:
            seen[packed.id] = number
        jobs.append(job)
    for number, place in unnamed:
        jobs[place]["id"] = check_id(f"{digest.hexdigest()[:16]}-{number}")
    return jobs


def _job_of_line(number: int, line: bytes, max_job_bytes: int) -> tuple[dict[str, object], Packed]:
    """Raise `InvalidRequest`."""
    try:
        if len(line) > 8 * max_job_bytes:  # a character may be written in six bytes
            raise InvalidRequest(f"it has {len(line)} bytes, too many for a job of {max_job_bytes}")
        job = read_json(line)
        packed = pack(job, max_job_bytes)
        return dict(job), packed
    except RequestError as error:
        raise InvalidRequest(f"line {number}: {error.message}") from None
