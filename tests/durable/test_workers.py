"""Workers in this process, with a transport that answers what a test says, against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import support.durable.needed  # noqa: F401
from support.durable.patience import until
from support.durable.worker_program import EchoTransport
from tidewheel_client import AsyncClient, Busy, InvalidRequest, MockTransport, ServerUnavailable
from tidewheel_client.answers import Chunk
from tidewheel_client.errors import Draining, EngineDead
from tidewheel_client.transport import Answer, Ask
from tidewheel_queue import AsyncQueue, Queue, Result, Worker, WorkerOptions
from tidewheel_queue.redis_endpoint import QueueNames, RedisEndpoint
from tidewheel_queue.worker_store import Batcher, FinishedJob, StreamChunk, WorkerStore

FAST = WorkerOptions(concurrency=4, lease_s=60, max_attempts=3, drain_s=60, until_empty=True)


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        await asyncio.wait_for(task, 60)


class Place:
    """A queue, and workers with a model that a function stands for."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.asked: list[Ask] = []
        self.notes: list[str] = []

    def worker(self, answer: Callable[[Ask], Answer], options: WorkerOptions = FAST) -> Worker:
        transport = MockTransport(answer)
        self.asked = transport.asked
        return self.worker_of(transport, options)

    def worker_of(self, transport: MockTransport, options: WorkerOptions = FAST) -> Worker:
        client = AsyncClient(transport=transport)
        return Worker(client, self.folder, name=self.name, options=options, note=self.notes.append)

    def queue(self) -> AsyncQueue:
        return AsyncQueue(self.folder, name=self.name)

    def run(
        self, answer: Callable[[Ask], Answer], *jobs: dict[str, Any], options: WorkerOptions = FAST
    ) -> list[Result]:
        """Enqueue the jobs, work until the queue is empty, and return their results."""

        async def use() -> list[Result]:
            async with self.queue() as queue:
                added = await queue.enqueue_many(jobs)
                await asyncio.wait_for(self.worker(answer, options).run(), 60)
                return [await queue.result(one.id) for one in added]

        return asyncio.run(use())


@pytest.fixture
def place(redis_folder: Path, name: str) -> Place:
    return Place(redis_folder, name)


def test_jobs_are_answered(place: Place) -> None:
    jobs = [{"prompt": f"job {i}", "id": f"j{i}", "params": {"max_tokens": i + 1}} for i in range(40)]
    results = place.run(lambda ask: str(ask.prompt["text_input"]).upper(), *jobs)
    assert [result.text for result in results] == [f"JOB {i}" for i in range(40)]
    assert {result.state for result in results} == {"done"}
    assert results[0].answer == {"text": "JOB 0", "finish_reason": "stop"}
    assert {ask.request_id for ask in place.asked} == {f"j{i}.1" for i in range(40)}


def test_a_request_has_all_of_its_job(place: Place) -> None:
    fields = {"tenant": "acme", "session_id": "s", "session_ttl_s": 9.5, "priority": 2}
    job = {"messages": [{"role": "user", "content": "x"}], "params": {"seed": 3}, "deadline_ms": 1e9, **fields}
    place.run(lambda ask: "y", job, {"input_ids": [1, 2]})
    (first, second) = place.asked
    deadline = first.params["deadline_ms"]
    assert isinstance(deadline, int)
    assert 0 < deadline <= 1e9
    assert first.params == {"seed": 3, **fields, "deadline_ms": deadline}
    assert first.prompt == {"messages": '[{"role": "user", "content": "x"}]'}
    assert second.prompt == {"input_ids": [1, 2]}


def test_better_classes_go_first(place: Place) -> None:
    jobs = [{"prompt": str(priority), "priority": priority} for priority in (4, 3, 0, 2, 1, 4)]
    one = WorkerOptions(concurrency=1, lease_s=60, until_empty=True)
    place.run(lambda ask: "x", *jobs, options=one)
    assert [ask.prompt["text_input"] for ask in place.asked] == ["1", "2", "3", "0", "4", "4"]


def test_the_lowest_class_does_not_starve(place: Place) -> None:
    jobs = [{"prompt": "low", "priority": 4}, *({"prompt": "high", "priority": 2} for _ in range(40))]
    one = WorkerOptions(concurrency=1, lease_s=60, until_empty=True)
    place.run(lambda ask: "x", *jobs, options=one)
    assert [ask.prompt["text_input"] for ask in place.asked].index("low") == 15


def test_a_refused_request_is_an_answer(place: Place) -> None:
    (result,) = place.run(lambda ask: InvalidRequest("top_q is unknown"), {"prompt": "x"})
    assert (result.state, result.error, result.tag) == ("failed", "top_q is unknown", "TW-INPUT")
    assert result.attempts == 1
    assert len(place.asked) == 1


@pytest.mark.parametrize("error", [Busy("full", retry_after_ms=1), Draining("ends")])
def test_a_busy_server_is_asked_again_and_nothing_is_counted(place: Place, error: Exception) -> None:
    answers = iter([error] * 2)
    (result,) = place.run(lambda ask: next(answers, "at last"), {"prompt": "x"})  # type: ignore[arg-type]
    assert (result.text, result.attempts) == ("at last", 1)
    assert len(place.asked) == 3


def test_a_job_goes_back_to_the_queue_when_the_server_is_busy_for_long(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            first = place.worker(lambda ask: Busy("full", retry_after_ms=60_000))
            async with working(first):
                await until(lambda: first.figures.given_back == 1, "given back")
                assert (await queue.result("a")).state == "waiting"
                assert (await queue.result("a")).attempts == 0
                assert (await queue.counts()).waiting == (0, 0, 1, 0)
                await place.worker(lambda ask: "from another").run()
            result = await queue.result("a")
            assert (result.text, result.attempts) == ("from another", 1)

    asyncio.run(use())


@pytest.mark.parametrize("error", [EngineDead("gone"), ServerUnavailable("away"), ZeroDivisionError("of a client")])
def test_a_job_that_fails_again_and_again_is_dead(place: Place, error: Exception) -> None:
    def answer(ask: Ask) -> Answer:
        raise error

    (result,) = place.run(answer, {"id": "a", "prompt": "poison", "priority": 1})
    assert (result.state, result.attempts) == ("dead", 3)
    assert str(result.error).endswith(str(error))
    assert [ask.request_id for ask in place.asked] == ["a.1", "a.2", "a.3"]

    async def dead() -> None:
        async with place.queue() as queue:
            (one,) = await queue.dead()
            assert (one.id, one.attempts, one.job.prompt, one.job.priority) == ("a", 3, "poison", 1)
            assert one.reason == result.error

    asyncio.run(dead())


def test_a_retry_succeeds(place: Place) -> None:
    answers = iter([EngineDead("gone")])
    (result,) = place.run(lambda ask: next(answers, "alive"), {"prompt": "x"})
    assert (result.state, result.text, result.attempts) == ("done", "alive", 2)


def test_a_passed_deadline_is_not_asked(place: Place) -> None:
    async def use() -> Result:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x", deadline_ms=1)
            await asyncio.sleep(0.01)  # the deadline
            await place.worker(lambda ask: "late").run()
            return await queue.result("a")

    result = asyncio.run(use())
    assert (result.state, result.tag, result.error) == ("failed", "TW-DEADLINE", "the deadline of 1 ms has passed")
    assert place.asked == []


class BreaksOnce(MockTransport):
    """Break the first answer after its first part."""

    def open(self, ask: Ask, timeout_s: float | None) -> Any:
        responses = super().open(ask, timeout_s)
        if len(self.asked) > 1:
            return responses
        receive, num_received = responses.receive, 0

        async def receive_or_break() -> list[Chunk] | None:
            nonlocal num_received
            num_received += 1
            if num_received > 1:
                raise EngineDead("gone")
            return await receive()

        responses.receive = receive_or_break  # type: ignore[method-assign]
        return responses


def test_tokens_come_as_they_are_made(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x", stream=True)
            reading = asyncio.create_task(_read_tokens(queue))
            await place.worker_of(BreaksOnce(lambda ask: ["one ", "two"])).run()
            assert await reading == [("one ", 1), ("one ", 2), ("two", 2)]
            assert (await queue.result("a")).text == "one two"
            assert 0 < await queue._redis.pttl(queue._names.tokens("a")) <= 86_400_000

    asyncio.run(use())


async def _read_tokens(queue: AsyncQueue) -> list[tuple[str, int]]:
    return [(part.text, part.attempt) async for part in queue.tokens("a")]


def test_a_running_job_is_cancelled(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            transport = EchoTransport(3600)
            worker = place.worker_of(transport, WorkerOptions(lease_s=3600))
            async with working(worker):
                await until(lambda: bool(transport.asked), "taken")
                assert (await queue.result("a")).state == "running"
                assert await queue.cancel("a")
                await until(lambda: not worker._held, "dropped")
            assert (await queue.result("a")).state == "cancelled"
            assert worker.figures.given_back == 0

    asyncio.run(use())


def test_a_missed_cancel_is_found_by_the_next_beat(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            transport = EchoTransport(3600)
            worker = place.worker_of(transport, WorkerOptions(lease_s=0.3, until_empty=True))
            async with working(worker):
                await until(lambda: bool(transport.asked), "taken")
                await queue._redis.client_kill_filter(_type="pubsub")
                await queue.cancel("a")
                await until(lambda: not worker._held, "dropped")

    asyncio.run(use())


def test_stopping_gives_back_what_does_not_end_in_time(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue_many([{"id": i, "prompt": "x"} for i in "abc"])
            transport = EchoTransport(3600)
            worker = place.worker_of(transport, WorkerOptions(lease_s=60, drain_s=0.01))
            async with working(worker):
                await until(lambda: len(transport.asked) == 3, "taken")
            assert worker.figures.given_back == 3
            assert (await queue.counts()).waiting == (0, 0, 3, 0)
            assert (await queue.result("a")).attempts == 0
            results = await _answered_by_another(place, queue)
            assert [result.attempts for result in results] == [1, 1, 1]
            consumers = await queue._redis.xinfo_consumers(queue._names.keys[2], "workers")
            assert [consumer["name"] for consumer in consumers] == ["returned"]

    asyncio.run(use())


async def _answered_by_another(place: Place, queue: AsyncQueue) -> list[Result]:
    await place.worker(lambda ask: "y").run()
    return [await queue.result(job_id) for job_id in "abc"]


def test_a_job_of_a_silent_worker_is_claimed_after_its_lease(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            transport = EchoTransport(3600)
            options = WorkerOptions(lease_s=0.2, max_attempts=2, until_empty=True)
            silent = asyncio.create_task(place.worker_of(transport, options).run())
            await until(lambda: bool(transport.asked), "taken")
            silent.cancel()  # as with kill -9, nothing is given back
            await asyncio.wait([silent])
            assert (await queue.result("a")).state == "running"
            await place.worker(lambda ask: "claimed", options).run()
            result = await queue.result("a")
            assert (result.text, result.attempts) == ("claimed", 2)

    asyncio.run(use())


def test_a_cancel_at_any_moment_of_a_call_ends_it(place: Place, redis_folder: Path) -> None:
    """Of a worker's and of a queue's calls: what they wait for may be there in the same turn of the loop."""

    async def cancelled(call: Callable[[], Coroutine[Any, Any, object]], turns: int) -> bool:
        task = asyncio.create_task(call())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            return False
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), f"the call goes on when it is cancelled after {turns} turns"
        return True

    async def use() -> None:
        server = RedisEndpoint(redis_folder)
        store = WorkerStore(server, QueueNames(place.name), "one", 3, place.notes.append)
        async with place.queue() as queue:
            for call in (store.has_jobs, queue.counts):
                await call()  # is connected
                assert [await cancelled(call, turns) for turns in range(4)] == [True] * 4
        await server.close()

    asyncio.run(use())


def test_a_cancel_that_comes_with_news_ends_a_worker(place: Place) -> None:
    async def use() -> None:
        for turns in range(6):
            worker = place.worker(lambda ask: "x", WorkerOptions())
            task = asyncio.create_task(worker.run())
            await until(lambda worker=worker: bool(worker._wake._waiters), "a worker that waits for news")  # type: ignore[misc]
            worker._ring()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=60)
            assert task.done(), f"the worker goes on when it is cancelled {turns} turns after the news"

    asyncio.run(use())


def test_a_held_job_stays_while_its_worker_beats(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            options = WorkerOptions(lease_s=1.0, until_empty=True)
            transport, other = EchoTransport(2.5), EchoTransport(0)
            async with working(place.worker_of(transport, options)):
                await until(lambda: bool(transport.asked), "taken")
                await place.worker_of(other, options).run()  # looks each second, until the job has ended
            assert (await queue.result("a")).text == "X"
            assert other.asked == []

    asyncio.run(use())


def test_a_job_whose_workers_die_is_buried(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            options = WorkerOptions(lease_s=0.2, max_attempts=1, until_empty=True)
            transport = EchoTransport(3600)
            silent = asyncio.create_task(place.worker_of(transport, options).run())
            await until(lambda: bool(transport.asked), "taken")
            silent.cancel()
            await asyncio.wait([silent])
            await place.worker(lambda ask: "never", options).run()
            result = await queue.result("a")
            assert (result.state, result.attempts) == ("dead", 1)
            assert str(result.error).startswith("no answer after 1 attempts")
            assert place.asked == []

    asyncio.run(use())


def test_a_worker_that_lost_its_lease_changes_nothing(place: Place, redis_folder: Path) -> None:
    async def use() -> None:
        server = RedisEndpoint(redis_folder)
        names = QueueNames(place.name)
        old, new = (WorkerStore(server, names, consumer, 2, place.notes.append) for consumer in ("old", "new"))
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x", stream=True)
            assert [one.id for one in await old.take(1, [], gone={}, claim=True, lowest_first=False)] == ["a"]
            assert await new.take(1, [], gone={}, claim=True, lowest_first=False) == []
            await old.beat(["a"])
            _, beats = await new.beat([])
            await old.beat(["a"])
            assert await new.take(1, [], gone=beats, claim=True, lowest_first=False) == [], "it beats again"
            _, beats = await new.beat([])
            (second,) = await new.take(1, [], gone=beats, claim=True, lowest_first=False)
            assert second.attempt == 2
            assert await old.beat(["a"]) == (["a"], {"new": "2"})
            assert not await old.fail("a", 1, "late")
            assert await old.give_back() == 0
            await old.emit([StreamChunk("a", 1, 1, "late")])
            assert await queue._redis.exists(names.tokens("a")) == 0
            assert (await new.beat(["a"]))[0] == []
            assert (await queue.result("a")).state == "running"
            assert await old.finish([FinishedJob.of("a", "done", text="the first")]) == [True]  # which is as good
            assert await new.finish([FinishedJob.of("a", "done", text="the second")]) == [False]
            assert (await queue.result("a")).text == "the first"
        await server.close()

    asyncio.run(use())


def test_calls_whose_answers_were_lost_are_repeated_without_effect(place: Place, redis_folder: Path) -> None:
    async def use() -> None:
        server = RedisEndpoint(redis_folder)
        store = WorkerStore(server, QueueNames(place.name), "one", 3, place.notes.append)
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x", stream=True)
            assert len(await store.take(1, [], gone={}, claim=True, lowest_first=False)) == 1
            for _ in range(2):
                await store.emit([StreamChunk("a", 1, 1, "one "), StreamChunk("a", 1, 2, "two")])
            for _ in range(3):
                assert await store.fail("a", 1, "the server is away")
            assert (await queue.result("a")).attempts == 2
            for parts in (
                [StreamChunk("a", 2, 1, "uno ")],
                [StreamChunk("a", 2, 1, "uno "), StreamChunk("a", 2, 2, "due")],
            ):
                await store.emit(parts)
            await store.finish([FinishedJob.of("a", "done", text="uno due")])
            assert await _read_tokens(queue) == [("one ", 1), ("two", 1), ("uno ", 2), ("due", 2)]
        await server.close()

    asyncio.run(use())


def test_parts_of_a_job_that_was_given_back_are_told_apart(place: Place, redis_folder: Path) -> None:
    """The attempt is not counted, and has its own number all the same."""

    async def use() -> None:
        server = RedisEndpoint(redis_folder)
        old, new = (
            WorkerStore(server, QueueNames(place.name), consumer, 1, place.notes.append)
            for consumer in ("old", "new")
        )
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x", stream=True)
            (first,) = await old.take(1, [], gone={}, claim=True, lowest_first=False)
            await old.emit([StreamChunk("a", first.attempt, 1, "one ")])
            assert await old.give_back() == 1
            (second,) = await new.take(1, [], gone={}, claim=True, lowest_first=False)
            await new.emit([StreamChunk("a", second.attempt, 1, "uno ")])
            await new.finish([FinishedJob.of("a", "done", text="uno ")])
            assert await _read_tokens(queue) == [("one ", 1), ("uno ", 2)]
            assert (await queue.result("a")).attempts == 1
        await server.close()

    asyncio.run(use())


def test_a_redis_without_a_file_is_noted(place: Place, queue: Queue) -> None:
    queue._core._redis.config_set("appendonly", "no")
    place.run(lambda ask: "x", {"prompt": "x"})
    assert "writes no append-only file" in place.notes[0]
    queue._core._redis.config_set("appendonly", "yes")
    place.run(lambda ask: "x", {"prompt": "x"})
    assert sum("append-only" in note for note in place.notes) == 1


def test_a_job_of_another_version_fails(place: Place) -> None:
    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            key = queue._names.keys[2]
            ((entry, fields),) = await queue._redis.xrange(key)
            await queue._redis.xdel(key, entry)
            await queue._redis.xtrim(key, 0)
            new = await queue._redis.xadd(key, fields | {"job": '{"prompt":"x","colour":"blue"}'})
            await queue._redis.hset(queue._names.job("a"), "entry", new)
            await queue._redis.xadd(key, {"no": "job"})
            await place.worker(lambda ask: "never").run()
            assert "this version cannot read the job" in str((await queue.result("a")).error)

    asyncio.run(use())


def test_a_server_that_is_away_is_waited_for(place: Place) -> None:
    class Away(MockTransport):
        looks = 0

        async def call(self, method: str, request: Any) -> Any:
            self.looks += 1
            if self.looks < 3:
                raise ServerUnavailable("no server answers")
            return await super().call(method, request)

    async def use() -> None:
        async with place.queue() as queue:
            await queue.enqueue(id="a", prompt="x")
            transport = Away(lambda ask: "here")
            await place.worker_of(transport).run()
            assert transport.looks == 3
            result = await queue.result("a")
            assert (result.text, result.attempts) == ("here", 1)

    asyncio.run(use())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "concurrency is 0: 1 to 4096"),
        ({"lease_s": 0.1}, r"lease_s is 0\.1: 0\.2 to 3600"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"drain_s": -1}, "drain_s is -1"),
        ({"drain_s": float("nan")}, "drain_s is nan"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        WorkerOptions(**options)


def test_items_that_come_during_a_write_are_written_together() -> None:
    async def use() -> list[list[int]]:
        writes: list[list[int]] = []
        free = asyncio.Event()

        async def write(items: list[int]) -> list[int]:
            writes.append(items)
            await free.wait()
            return [10 * item for item in items]

        batcher = Batcher(write, most=3)
        running = asyncio.create_task(batcher.run())
        futures = [batcher.add(0)]
        await until(lambda: bool(writes), "a write")
        futures += [batcher.add(item) for item in range(1, 6)]
        futures[2].cancel()
        free.set()
        assert await asyncio.gather(*futures[3:]) == [30, 40, 50]
        running.cancel()
        return writes

    assert asyncio.run(use()) == [[0], [1, 2, 3], [4, 5]]
