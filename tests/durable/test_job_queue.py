"""`Queue` and `AsyncQueue` against a real Redis: ids, bounds, results, cancelling, errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import support.durable.needed  # noqa: F401
from tidewheel_client import (
    Busy,
    InvalidRequest,
    NotFound,
    RequestError,
    RequestTimeout,
    ServerUnavailable,
    Unsupported,
)
from tidewheel_client.facade import run
from tidewheel_queue import AsyncQueue, EnqueuedJob, Job, Queue
from tidewheel_queue.redis_endpoint import SCRIPTS, BlockingRedisEndpoint, QueueNames


def finish(queue: Queue, name: str, job_id: str, result: str = '{"text":"done"}', state: str = "done") -> list[int]:
    names = QueueNames(name)
    return list(
        queue._core._redis.register_script(SCRIPTS["finish"])(names.keys, [names.prefix, job_id, state, result])
    )


def test_a_job_waits(queue: Queue) -> None:
    job = queue.enqueue(prompt="x", priority=2)
    assert queue.result(job.id).state == "waiting"
    assert queue.counts().waiting == (0, 1, 0, 0)


def test_a_known_id_is_not_added_again(queue: Queue, name: str) -> None:
    assert queue.enqueue(id="a", prompt="first") == EnqueuedJob("a", True)
    assert queue.enqueue(id="a", prompt="second", priority=1) == EnqueuedJob("a", False)
    assert queue.enqueue_many([{"id": "b", "prompt": "x"}, {"id": "b", "prompt": "y"}]) == [("b", True), ("b", False)]
    assert sum(queue.counts().waiting) == 2
    finish(queue, name, "a")
    assert queue.enqueue(id="a", prompt="third") == EnqueuedJob("a", False)
    assert queue.result("a").text == "done"


def test_the_first_result_stays(queue: Queue, name: str) -> None:
    queue.enqueue(id="a", prompt="x")
    assert finish(queue, name, "a") == [1]
    assert finish(queue, name, "a", '{"text":"other"}') == [0]
    assert finish(queue, name, "unknown") == [0]
    assert [result.text for result in queue.results()] == ["done"]
    assert sum(queue.counts().waiting) == 0


def test_the_bound_refuses_a_whole_group(redis_folder: Path, name: str) -> None:
    with Queue(redis_folder, name=name, bound=3) as queue:
        queue.enqueue_many([{"id": str(i), "prompt": "x"} for i in range(2)])
        with pytest.raises(
            Busy, match="holds 2 jobs that wait or run, and 2 more would pass its bound of 3"
        ) as raised:
            queue.enqueue_many([{"id": "2", "prompt": "x"}, {"id": "3", "prompt": "x"}])
        assert raised.value.retry_after_ms
        assert sum(queue.counts().waiting) == 2
        again = [{"id": "0", "prompt": "x"}, {"id": "2", "prompt": "x"}, {"id": "2", "prompt": "x"}]
        assert [one.is_new for one in queue.enqueue_many(again)] == [False, True, False]
        assert finish(queue, name, "0") == [1]
        assert queue.enqueue(id="3", prompt="x").is_new


def test_a_wrong_job_among_many_adds_none(queue: Queue) -> None:
    with pytest.raises(InvalidRequest):
        queue.enqueue_many([{"prompt": "x"}, {"prompt": 3}])
    assert sum(queue.counts().waiting) == 0


def test_results_have_a_time_to_live(redis_folder: Path, name: str) -> None:
    with Queue(redis_folder, name=name, result_ttl_s=3600) as queue:
        queue.enqueue(id="a", prompt="x")
        key = QueueNames(name).job("a")
        assert queue._core._redis.pttl(key) == -1
        finish(queue, name, "a")
        assert 0 < queue._core._redis.pttl(key) <= 3_600_000
        queue._core._redis.delete(key)
        assert list(queue.results()) == []
        with pytest.raises(NotFound, match="has no job 'a': unknown, or its time to live is over"):
            queue.result("a")


def test_waiting_for_a_result(queue: Queue, name: str) -> None:
    queue.enqueue_many([{"id": i, "prompt": "x"} for i in "ab"])
    with pytest.raises(RequestTimeout, match=r"job 'a' is waiting after 0\.01 s"):
        queue.result("a", wait_s=0.01)
    ending = threading.Thread(target=lambda: [finish(queue, name, job_id) for job_id in "ba"])
    ending.start()
    assert queue.result("a", wait_s=60).text == "done"
    ending.join()


def test_cancel_a_waiting_job(queue: Queue) -> None:
    queue.enqueue(id="a", prompt="x")
    assert queue.cancel("a")
    assert not queue.cancel("a")
    assert queue.result("a").state == "cancelled"
    assert sum(queue.counts().waiting) == 0
    with pytest.raises(NotFound):
        queue.cancel("unknown")


def test_async_queue(redis_folder: Path, name: str, queue: Queue) -> None:
    async def use() -> None:
        async with AsyncQueue(redis_folder, name=name) as one:
            assert await one.enqueue(Job(id="a", prompt="x", stream=True)) == EnqueuedJob("a", True)
            assert (await one.result("a")).state == "waiting"
            assert (await one.counts()).waiting == (0, 0, 1, 0)
            waiting = asyncio.create_task(one.result("a", wait_s=60))
            assert await one.cancel("a")
            assert (await waiting).state == "cancelled"
            assert [result.id async for result in one.results()] == ["a"]
            assert [part async for part in one.tokens("a")] == []
            assert await one.dead() == []

    asyncio.run(use())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "a b"}, "queue name 'a b'"),
        ({"name": "{a}"}, "queue name"),
        ({"bound": 0}, "bound is 0"),
        ({"result_ttl_s": 0}, "result_ttl_s is 0"),
    ],
)
def test_wrong_arguments(short_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Queue(short_path / "q", **arguments)
    assert not (short_path / "q").exists()


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret@127.0.0.1:1",
        "rediss://me:secret@127.0.0.1:1/0",
        "unix://me:secret@/no/such/socket",
        "redis://:sec/ret@127.0.0.1",
        "redis://me:123/secret@127.0.0.1",
        "redis://me:se#secret@127.0.0.1",
        "http://me:secret@127.0.0.1",
        "redis://me:secret@127.0.0.1:1/0?no_such_option=secret",
        "redis://me:secret@127.0.0.1:1/0?db=secret",
    ],
)
def test_no_error_shows_the_password(url: str) -> None:
    with pytest.raises(RequestError) as raised:
        Queue(url)
    assert "sec" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unreachable_redis_is_unavailable() -> None:
    with pytest.raises(ServerUnavailable, match=r"no Redis answers at redis://127\.0\.0\.1:1 "):
        Queue("redis://127.0.0.1:1")


@pytest.mark.parametrize("version", ["6.0.16", "5", "0"])
def test_an_old_redis_is_refused(redis_folder: Path, version: str) -> None:
    endpoint = BlockingRedisEndpoint(redis_folder)
    with pytest.raises(Unsupported, match=f"is {version}: a queue needs 6.2 or later"):
        endpoint.check_version(version)
    endpoint.check_version("6.2.0")
    endpoint.check_version("7.4.1-rc")
    run(endpoint.close())


def test_access_control(redis_folder: Path, name: str, queue: Queue) -> None:
    """Docs name the rights that a user needs."""
    socket = redis_folder / "redis.sock"
    rights = f"on >secret resetkeys resetchannels -@all +@read +@write +@stream +@scripting +@connection +@pubsub +info +time ~tidewheel:{{{name}}}:* &tidewheel:{{{name}}}:*"  # noqa: E501
    queue._core._redis.execute_command("ACL", "SETUSER", "worker", *rights.split())
    with pytest.raises(RequestError, match="refuses the user or the password of the URL"):
        Queue(f"unix://worker:wrong@{socket}", name=name)
    with Queue(f"unix://worker:secret@{socket}", name=name) as allowed:
        allowed.enqueue(id="a", prompt="x")
        assert allowed.cancel("a")
        assert allowed.counts().dead == 0
    with Queue(f"unix://worker:secret@{socket}", name="other") as other, pytest.raises(RequestError, match="refuses"):
        other.enqueue(prompt="x")


def test_the_client_needs_no_redis() -> None:
    code = """
import sys
sys.modules["redis"] = None
import tidewheel_client
try:
    import tidewheel_queue
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "a queue needs the package redis: pip install 'tidewheel[queue]'\n"
