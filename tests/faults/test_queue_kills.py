"""Every job of a durable queue has one answer, whatever dies while a real server works: `make test-extra`."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

import support.durable.needed  # noqa: F401
from support.durable.patience import enqueue_at_last, wait_until_all_ended
from support.durable.processes import WorkerProcess, kill_redis
from support.faults.service import serving
from support.triton.serving import Server
from tidewheel_queue import Queue

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 2.0
LIMIT_S = 300.0
NUM_WORKERS = 2
PIECE = 40  # jobs between two kills
NUM_TOKENS = 24
# Fewer of a part of the server than `serve` and the launcher take for a crash loop.
KILLS = ("worker", "worker", "redis", "redis and its guard", "engine", "engine", "front end", "tritonserver")


class Place:
    """A server, a queue and workers, all of which may be killed."""

    def __init__(self, server: Server, folder: Path, chance: random.Random) -> None:
        self._server, self.folder, self._chance = server, folder, chance
        self.workers = [self._start_worker() for _ in range(NUM_WORKERS)]
        self._kills: Mapping[str, Callable[[], bool]] = MappingProxyType(
            {
                "worker": self._kill_worker,
                "redis": lambda: kill_redis(folder),
                "redis and its guard": lambda: kill_redis(folder, guard=True),
                "engine": lambda: killed(server.engine_process()),
                "front end": lambda: killed(next(iter(server.stubs("demo")), None)),
                "tritonserver": lambda: killed(next(iter(server.processes("/tritonserver --")), None)),
            }
        )

    def kill(self, victim: str) -> bool:
        """Return whether there was one: it may be between two lives."""
        return self._kills[victim]()

    def _start_worker(self) -> WorkerProcess:
        command = [
            sys.executable,
            "-m",
            "tidewheel.cli.main",
            "worker",
            "--url",
            self._server.grpc,
            "--model",
            "demo",
        ]
        command += ["--dir", str(self.folder), "--queue", "kills", "--concurrency", "8"]
        command += ["--lease-s", str(LEASE_S), "--max-attempts", "1000"]
        return WorkerProcess(command, self._server.log.parent / "workers.log")

    def _kill_worker(self) -> bool:
        index = self._chance.randrange(NUM_WORKERS)
        self.workers[index].kill()
        self.workers[index] = self._start_worker()
        return True


def killed(process: psutil.Process | None) -> bool:
    try:
        if process is not None:
            process.kill()
    except psutil.NoSuchProcess:
        return False
    return process is not None


@contextmanager
def placed(server: Server, folder: Path, chance: random.Random) -> Iterator[Place]:
    place = Place(server, folder, chance)
    try:
        yield place
    finally:
        for worker in place.workers:
            worker.kill()


@pytest.mark.parametrize("seed", range(1, 5))
def test_each_job_is_answered_once_by_a_server_that_dies(tmp_path: Path, short_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = short_path / "queue"
    victims = chance.sample(KILLS, len(KILLS))
    ids = [f"job-{i}" for i in range(PIECE * len(victims))]
    with serving(tmp_path) as server, Queue(folder, name="kills") as queue, placed(server, folder, chance) as place:
        hits = []
        for number, victim in enumerate(victims):
            enqueue_at_last(queue, [job(one, chance) for one in ids[number * PIECE :][:PIECE]], LIMIT_S)
            time.sleep(chance.uniform(0, 3))  # the moment of the kill
            hits.append(place.kill(victim))
        wait_until_all_ended(queue, LIMIT_S)
        results = list(queue.results())
        streamed = {result.id: streamed_text(queue, result.id) for result in results if is_streamed(result.id)}
    assert sum(hits) > len(KILLS) // 2
    assert Counter(result.id for result in results) == Counter(ids)
    assert {(result.state, (result.answer or {}).get("num_output_tokens")) for result in results} == {
        ("done", NUM_TOKENS)
    }
    assert streamed == {result.id: result.text for result in results if result.id in streamed}


def job(name: str, chance: random.Random) -> dict[str, object]:
    params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_num_output_tokens": True}
    return {
        "id": name,
        "prompt": f"A tuple is {name}",
        "priority": chance.randint(1, 4),
        "stream": is_streamed(name),
        "params": params,
    }


def is_streamed(name: str) -> bool:
    return name.endswith(("0", "5"))


def streamed_text(queue: Queue, name: str) -> str:
    """Return the text of the last attempt's parts."""
    parts = list(queue.tokens(name))
    return "".join(part.text for part in parts if part.attempt == parts[-1].attempt)
