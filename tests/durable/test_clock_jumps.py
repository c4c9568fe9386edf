"""Workers of a Redis whose wall clock is set while jobs run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import support.durable.needed  # noqa: F401
from support.durable import shifted_redis
from support.durable.patience import until
from support.durable.shifted_redis import ShiftedRedis
from support.durable.worker_program import EchoTransport
from tidewheel_client import AsyncClient, MockTransport
from tidewheel_queue import AsyncQueue, Worker, WorkerOptions
from tidewheel_queue.worker_store import SilenceWatch

HOUR_S = 3600
JOBS = [{"id": name, "prompt": name} for name in "abcd"]


@pytest.fixture
def redis(short_path: Path) -> Iterator[ShiftedRedis]:
    with shifted_redis.running(short_path) as server:
        yield server


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_worker_that_lives_keeps_its_jobs(redis: ShiftedRedis, jump_s: int) -> None:
    """The other worker looks several times after the jump, for jobs of a worker that is gone."""
    options = WorkerOptions(lease_s=6, until_empty=True)

    async def use() -> None:
        async with AsyncQueue(redis.url) as queue:
            await queue.enqueue_many(JOBS)
            transport, other = EchoTransport(4.0), MockTransport(lambda ask: "from another")
            first = asyncio.create_task(Worker(AsyncClient(transport=transport), redis.url, options=options).run())
            await until(lambda: len(transport.asked) == len(JOBS), "taken")
            redis.jump(jump_s)
            await Worker(AsyncClient(transport=other), redis.url, options=options).run()
            await asyncio.wait_for(first, 60)
            assert other.asked == []
            results = [await queue.result(job["id"]) for job in JOBS]
            assert [(one.state, one.text, one.attempts) for one in results] == [("done", x, 1) for x in "ABCD"]

    asyncio.run(use())


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_jobs_of_a_dead_worker_are_taken_all_the_same(redis: ShiftedRedis, jump_s: int) -> None:
    options = WorkerOptions(lease_s=0.3, until_empty=True)

    async def use() -> None:
        async with AsyncQueue(redis.url) as queue:
            await queue.enqueue_many(JOBS)
            transport = EchoTransport(HOUR_S)
            dead = asyncio.create_task(Worker(AsyncClient(transport=transport), redis.url, options=options).run())
            await until(lambda: len(transport.asked) == len(JOBS), "taken")
            dead.cancel()  # as with kill -9, nothing is given back
            await asyncio.wait([dead])
            redis.jump(jump_s)
            other = Worker(AsyncClient(transport=EchoTransport(0)), redis.url, options=options)
            await asyncio.wait_for(other.run(), 60)
            results = [await queue.result(job["id"]) for job in JOBS]
            assert [(one.state, one.text, one.attempts) for one in results] == [("done", x, 2) for x in "ABCD"]

    asyncio.run(use())


def test_only_a_beat_that_stays_for_long_ends_a_worker() -> None:
    watch = SilenceWatch(3)
    looks = [{"a": "1", "b": "7"}, {"a": "1", "b": "7"}, {"a": "2", "b": "7"}, {"a": "2", "b": "7"}]
    assert [watch.look(beats) for beats in looks] == [{}, {}, {}, {"b": "7"}]
    assert watch.look({"a": "2"}) == {}, "b holds no job any more"
    assert watch.look({"a": "2", "b": "7"}) == {"a": "2"}, "b begins anew"


def test_a_worker_of_which_no_beat_is_known_is_given_as_long() -> None:
    watch = SilenceWatch(2)
    assert [watch.look({"old": ""}) for _ in range(3)] == [{}, {}, {"old": ""}]
