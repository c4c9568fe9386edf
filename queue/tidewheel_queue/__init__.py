"""Durable jobs in Redis Streams, and workers that answer them; needs the extra `queue`."""

try:
    import redis as _redis
except ImportError:
    raise ImportError("a queue needs the package redis: pip install 'tidewheel[queue]'") from None

from tidewheel_queue.job_queue import AsyncQueue, Queue
from tidewheel_queue.job_worker import Worker, WorkerOptions
from tidewheel_queue.jobs import DeadJob, EnqueuedJob, Job, JobCounts, Result, TextChunk

__all__ = [
    "AsyncQueue",
    "DeadJob",
    "EnqueuedJob",
    "Job",
    "JobCounts",
    "Queue",
    "Result",
    "TextChunk",
    "Worker",
    "WorkerOptions",
]
del _redis
