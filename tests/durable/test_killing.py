"""Every job is answered just once, whatever is killed: workers, Redis, its guard. `make test-long` kills more."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import support.durable.needed  # noqa: F401
from support.durable.patience import enqueue_at_last, wait_until_all_ended
from support.durable.processes import WorkerProcess, echoing_worker, kill_redis
from tidewheel_queue import Queue

LONG = bool(os.environ.get("TIDEWHEEL_LONG"))
LEASE_S = 1.0
LIMIT_S = 120.0


@contextmanager
def workers(folder: Path, count: int) -> Iterator[list[WorkerProcess]]:
    running = [start(folder) for _ in range(count)]
    try:
        yield running
    finally:
        for worker in running:
            worker.kill()


def start(folder: Path) -> WorkerProcess:
    return echoing_worker(folder, "kills", folder.parent / "begun", delay_s=0.02, lease_s=LEASE_S)


def kill_one(chance: random.Random, folder: Path, running: list[WorkerProcess]) -> None:
    victim = chance.choice(["worker", "worker", "redis", "redis and its guard"])
    if victim == "worker":
        index = chance.randrange(len(running))
        running[index].kill()
        running[index] = start(folder)
    else:
        kill_redis(folder, guard=victim == "redis and its guard")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_each_job_is_answered_once(short_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    num_jobs, num_kills = (3000, 40) if LONG else (400, 6)
    folder = short_path / "queue"
    ids = [f"job-{i}" for i in range(num_jobs)]
    with Queue(folder, name="kills") as queue, workers(folder, 3) as running:
        piece = num_jobs // num_kills + 1
        for begin in range(0, num_jobs, piece):
            jobs = [{"id": one, "prompt": one, "priority": chance.randint(1, 4)} for one in ids[begin:][:piece]]
            enqueue_at_last(queue, jobs, LIMIT_S)
            time.sleep(chance.uniform(0, 0.6))  # the moment of the kill
            kill_one(chance, folder, running)
        wait_until_all_ended(queue, LIMIT_S)
        results = list(queue.results())
    assert Counter(result.id for result in results) == Counter(ids)
    assert all((result.state, result.text) == ("done", result.id.upper()) for result in results)
    begun = (short_path / "begun").read_text().split()
    assert {request.rpartition(".")[0] for request in begun} == set(ids)


def test_a_stopped_worker_leaves_nothing_to_a_lease(short_path: Path) -> None:
    folder = short_path / "queue"
    with Queue(folder, name="kills") as queue:
        queue.enqueue_many([{"id": f"job-{i}", "prompt": "x"} for i in range(200)])
        worker = echoing_worker(folder, "kills", short_path / "begun", delay_s=0.2, lease_s=3600)  # 10 s for all
        while not list(queue.results()):
            time.sleep(0.02)
        assert worker.stop(60) == 0
        counts = queue.counts()
        assert sum(counts.running) == 0
        results = list(queue.results())
        assert len(results) + sum(counts.waiting) == 200
        assert 0 < len(results) < 200
