"""Durable jobs in Redis Streams, and workers that answer them; needs the extra `queue`."""

try:
    import redis as _redis
except ImportError:
    raise ImportError("a queue needs the package redis: pip install 'tidewheel[queue]'") from None

from tidewheel_queue.job_queue import AsyncQueue as AsyncQueue
from tidewheel_queue.job_queue import Queue as Queue
from tidewheel_queue.job_worker import Worker as Worker
from tidewheel_queue.job_worker import WorkerOptions as WorkerOptions
from tidewheel_queue.jobs import DeadJob as DeadJob
from tidewheel_queue.jobs import EnqueuedJob as EnqueuedJob
from tidewheel_queue.jobs import Job as Job
from tidewheel_queue.jobs import JobCounts as JobCounts
from tidewheel_queue.jobs import Result as Result
from tidewheel_queue.jobs import TextChunk as TextChunk

del _redis
