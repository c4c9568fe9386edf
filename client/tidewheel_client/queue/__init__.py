"""Durable work: jobs in Redis Streams, and workers that answer them. Needs the extra `queue`."""

from __future__ import annotations

try:
    import redis as _redis
except ImportError:
    raise ImportError("a queue needs the package redis: pip install 'tidewheel[queue]'") from None

from tidewheel_client.queue.async_queue import AsyncQueue
from tidewheel_client.queue.job_queue import Queue
from tidewheel_client.queue.job_worker import Worker, WorkerOptions
from tidewheel_client.queue.jobs import Chunked, Counts, DeadJob, Enqueued, Job, Result

__all__ = [
    "AsyncQueue",
    "Chunked",
    "Counts",
    "DeadJob",
    "Enqueued",
    "Job",
    "Queue",
    "Result",
    "Worker",
    "WorkerOptions",
]
del _redis
