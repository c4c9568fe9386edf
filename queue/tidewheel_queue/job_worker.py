import asyncio
import dataclasses
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from tidewheel_client.answers import Completion
from tidewheel_client.async_client import AsyncClient
from tidewheel_client.errors import Busy, DeadlineExceeded, Draining, InvalidRequest, RequestError
from tidewheel_client.facade import AsyncEvent
from tidewheel_queue.jobs import Job
from tidewheel_queue.redis_endpoint import QueueNames, RedisEndpoint
from tidewheel_queue.worker_store import Batcher, FinishedJob, SilenceWatch, StreamChunk, TakenJob, WorkerStore

MAX_RESULT_BYTES = 16 << 20
_LOOK_EVERY_S = 1.0  # between takes without a message
_BEATS_PER_LEASE = 3
_LOWEST_FIRST_EVERY = 16  # takes begin with the lowest class, against starvation
_LONGEST_HOLD_S = 5.0  # of a job, while the server is busy
_FIRST_BUSY_WAIT_S = 0.25
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0  # at a server that is away


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    concurrency: int = 16
    lease_s: float = 30.0  # of silence, before others take the jobs
    max_attempts: int = 5
    drain_s: float = 30.0  # for jobs after `stop`
    until_empty: bool = False  # end when no job waits or runs

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("concurrency", 1, 4096), ("lease_s", 0.2, 3600), ("max_attempts", 1, 1000), ("drain_s", 0, 86_400),
        ):  # fmt: skip
            value = getattr(self, name)
            if not lowest <= value <= highest:
                raise InvalidRequest(f"{name} is {value}: {lowest:g} to {highest:g} are allowed")


@dataclass(slots=True)
class WorkerFigures:
    done: int = 0
    failed: int = 0
    dead: int = 0  # or lost to another worker
    given_back: int = 0


@dataclass(eq=False, repr=False)  # `where` may hold a password
class Worker:
    """Worker that answers a queue's jobs through `client`, and writes the results.

    It keeps jobs while its counter in Redis rises; `lease_s` after its death, others take them. A job gets one
    result, however often it begins. `run` returns after `stop`; cancelled, it gives no jobs back.
    """

    client: AsyncClient
    where: str | Path
    _: KW_ONLY
    name: str = "default"  # of the queue
    options: WorkerOptions = WorkerOptions()
    note: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.figures = WorkerFigures()
        self.consumer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._names = QueueNames(self.name)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._taking = asyncio.Lock()  # a job being taken is not yet in `_held`
        self._wake = AsyncEvent()
        self._is_stopping = False
        self._num_takes = 0
        self._next_claim = 0.0
        self._gone: dict[str, str] = {}  # as for `take`
        self._gate = ServerGate(self.client, self.note, self._wake.set)

    async def run(self) -> None:
        """Answer jobs until `stop`. Raise `RequestError` if Redis is away at the start."""
        endpoint = await RedisEndpoint.open(self.where)
        try:
            self._store = WorkerStore(endpoint, self._names, self.consumer, self.options.max_attempts, self.note)
            if not endpoint.writes_file:
                self.note(f"Redis at {endpoint.name} writes no append-only file: jobs are lost when it ends")
            self._finishes: Batcher[FinishedJob, bool] = Batcher(self._store.finish)
            self._emits: Batcher[StreamChunk, None] = Batcher(self._store.emit)
            async with asyncio.TaskGroup() as group:
                keepers = [
                    group.create_task(coroutine)
                    for coroutine in (
                        self._finishes.run(), self._emits.run(), self._gate.run(), self._beat(),
                        self._store.listen(self._ring, self._drop),
                    )
                ]  # fmt: skip
                await self._take(group)
                await self._drain()
                for keeper in keepers:
                    keeper.cancel()
        except BaseExceptionGroup as group_error:  # of a task, whose end cancels the others
            raise group_error.exceptions[0] from None
        finally:
            await endpoint.close()

    def stop(self) -> None:
        """Take no more jobs; finish the held ones, or give them back after `drain_s`."""
        self._is_stopping = True
        self._gate.end()
        self._wake.set()

    async def _take(self, group: asyncio.TaskGroup) -> None:
        while not self._is_stopping:
            self._wake.clear()
            room = self.options.concurrency - len(self._held)
            if room > 0 and self._gate.is_open:
                if await self._take_some(group, room):
                    continue
                if self.options.until_empty and not self._held and not await self._store.has_jobs():
                    return
            await self._wake.wait_for(_LOOK_EVERY_S)

    async def _take_some(self, group: asyncio.TaskGroup, room: int) -> bool:
        now = time.monotonic()
        claim = now >= self._next_claim
        if claim:
            self._next_claim = now + _LOOK_EVERY_S
        self._num_takes += 1
        async with self._taking:
            taken = await self._store.take(
                room,
                self._held,
                gone=self._gone,
                claim=claim,
                lowest_first=self._num_takes % _LOWEST_FIRST_EVERY == 0,
            )
            for one in taken:
                if one.id in self._held:  # lost in a stall, then given back by another worker
                    self._held.pop(one.id).cancel()
                self._held[one.id] = group.create_task(self._work(one))
        return bool(taken)

    async def _drain(self) -> None:
        if self._held:
            self.note(f"finishing {len(self._held)} jobs, for up to {self.options.drain_s:g} s")
            _, late = await asyncio.wait(self._held.values(), timeout=self.options.drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self.figures.given_back += await self._store.give_back()
        await self._store.leave()

    async def _beat(self) -> None:
        beat_s = min(_LOOK_EVERY_S, self.options.lease_s / _BEATS_PER_LEASE)
        watch = SilenceWatch(math.ceil(self.options.lease_s / beat_s))
        while True:
            lost, others = await self._store.beat(list(self._held))
            for job_id in lost:
                self._drop(job_id)
            self._gone = watch.look(others)
            if self._gone:
                self._wake.set()
            await asyncio.sleep(beat_s)

    def _ring(self) -> None:
        self._next_claim = 0.0
        self._wake.set()

    def _drop(self, job_id: str) -> None:
        if job_id in self._held:
            self._held[job_id].cancel()

    async def _work(self, taken: TakenJob) -> None:
        try:
            ended = await self._answer(taken)
            if ended is not None and await self._finishes.add(ended):
                self.figures.done += ended.state == "done"
                self.figures.failed += ended.state != "done"
        finally:
            if self._held.get(taken.id) is asyncio.current_task():
                del self._held[taken.id]
            self._wake.set()

    async def _answer(self, taken: TakenJob) -> FinishedJob | None:
        try:
            job = Job.of_payload(taken.payload)
        except InvalidRequest as error:
            return _failed(taken, error)
        attempt, busy_s = taken.attempt, 0.0
        end = math.inf if job.deadline_ms is None else time.monotonic() + (job.deadline_ms - taken.age_ms) / 1e3
        while await self._gate.wait():
            if end <= time.monotonic():
                return _failed(taken, DeadlineExceeded(f"the deadline of {job.deadline_ms:g} ms has passed"))
            try:
                return _done(taken, await self._ask(job, taken.id, attempt, end))
            except (Busy, Draining) as error:
                backoff_ms = 1e3 * max(busy_s, _FIRST_BUSY_WAIT_S)
                wait_s = max(backoff_ms if error.retry_after_ms is None else error.retry_after_ms, 10) / 1e3
                busy_s += wait_s
                if not await self._wait_for_room(taken, error, wait_s, busy_s):
                    return None
                continue
            except RequestError as error:
                if not error.retryable:
                    return _failed(taken, error)
                reason = str(error)
                self._gate.shut(reason)
            except Exception as error:  # of a client: the job must still end
                reason = f"{type(error).__name__}: {error}"
            if not await self._store.fail(taken.id, attempt, reason):
                self.figures.dead += 1
                self.note(
                    f"job {taken.id} is given up, or another worker's: `tidewheel results --dead` has the reason"
                )
                return None
            attempt += 1
        return None

    async def _ask(self, job: Job, job_id: str, attempt: int, end: float) -> Completion:
        arguments = job.arguments | {"request_id": f"{job_id}.{attempt}"}
        if end < math.inf:
            arguments["deadline_ms"] = max(1, int(1e3 * (end - time.monotonic())))
        if not job.stream:
            return await self.client.generate(**arguments)
        chunks, written = [], None
        async with self.client.stream(**arguments) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if chunk.text:
                    written = self._emits.add(StreamChunk(job_id, attempt, len(chunks), chunk.text))
        if written is not None:
            await written  # before the end is
        return Completion.from_chunks(arguments["request_id"], chunks)

    async def _wait_for_room(self, taken: TakenJob, error: RequestError, wait_s: float, busy_s: float) -> bool:
        self._gate.pause(wait_s)
        if isinstance(error, Draining):
            self._gate.shut(str(error))
        if busy_s <= _LONGEST_HOLD_S:
            return await self._gate.wait(wait_s)
        async with self._taking:
            self.figures.given_back += await self._store.give_back(set(self._held) - {taken.id})
        return False


class ServerGate:
    """Gate of a worker, shut while the server is away or busy. Each opening calls `on_open`."""

    def __init__(self, client: AsyncClient, note: Callable[[str], None], on_open: Callable[[], None]) -> None:
        self._client = client
        self._note = note
        self._on_open = on_open
        self._opened = asyncio.Event()
        self._shut = asyncio.Event()
        self._ending = AsyncEvent()
        self._paused_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and time.monotonic() >= self._paused_until

    def shut(self, reason: str) -> None:
        if self._opened.is_set() and not self._ending.is_set():
            self._note(f"the server at {self._client.url} is away, its jobs wait for it: {reason}")
            self._opened.clear()
            self._shut.set()

    def pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    async def wait(self, seconds: float = 0.0) -> bool:
        """Wait `seconds`, then until the gate opens. Return False if the worker ends."""
        if seconds > 0:
            await self._ending.wait_for(seconds)
        await self._opened.wait()
        return not self._ending.is_set()

    def end(self) -> None:
        """Open the gate for good, so that waiting tasks give back their jobs."""
        self._ending.set()
        self._opened.set()

    async def run(self) -> None:
        while True:
            look_s = _FIRST_LOOK_S
            while not await self._is_ready():
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
            self._note(f"model {self._client.model!r} at {self._client.url} is ready")
            self._opened.set()
            self._on_open()
            await self._shut.wait()
            self._shut.clear()

    async def _is_ready(self) -> bool:
        try:
            return await self._client.is_ready()
        except RequestError:
            return False


def _done(taken: TakenJob, completion: Completion) -> FinishedJob:
    fields = {name: value for name, value in dataclasses.asdict(completion).items() if value is not None}
    del fields["request_id"], fields["index"]
    made = FinishedJob.of(taken.id, "done", **fields)
    if len(made.result) > MAX_RESULT_BYTES:
        return FinishedJob.of(
            taken.id, "failed", error=f"the answer has {len(made.result)} bytes; {MAX_RESULT_BYTES} are kept"
        )
    return made


def _failed(taken: TakenJob, error: RequestError) -> FinishedJob:
    return FinishedJob.of(taken.id, "failed", error=error.message, tag=error.label)
