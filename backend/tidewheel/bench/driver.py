import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tidewheel.bench.outcome import (
    TIMEOUT,
    UNANSWERED,
    UNREADABLE,
    Conversation,
    OfferedRequest,
    RequestFailed,
    RequestOutcome,
)

POLL_S = 0.1


class BenchTransport(Protocol):
    can_cancel: bool  # cancelling `send` ends the request on the server

    async def open(self) -> None:
        """Connect to the server. Raise `BenchError` for an unfit model."""

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        """Send a request and fill `outcome`. Raise `RequestFailed`."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class RunProgress:
    start: float = 0.0  # perf_counter
    outcomes: list[RequestOutcome] = field(default_factory=list)
    num_ended: int = 0

    def now(self) -> float:
        return time.perf_counter() - self.start


@dataclass(frozen=True, slots=True)
class RunLimits:
    seconds: float  # of sending, in a closed loop
    max_requests: int | None = None
    timeout_s: float = 120.0


class LoadDriver:
    def __init__(self, transport: BenchTransport, limits: RunLimits, progress: RunProgress) -> None:
        self._transport = transport
        self._limits = limits
        self._progress = progress

    async def open_loop(self, load: Iterable[Conversation], is_settled: Callable[[], bool] | None = None) -> None:
        """Send each conversation at its time, without waiting for answers. When all are sent and `is_settled()`,
        cancel open requests if the transport can.
        """
        self._progress.start = time.perf_counter()
        started = []
        async with asyncio.TaskGroup() as tasks:
            for conversation in load:
                await asyncio.sleep(max(0.0, conversation[0].at - self._progress.now()))
                started.append(tasks.create_task(self._converse(conversation)))
            if is_settled is None or not self._transport.can_cancel:
                return
            while rest := [task for task in started if not task.done()]:
                await asyncio.wait(rest, timeout=POLL_S)
                if is_settled():
                    break
            for task in rest:
                task.cancel()

    async def closed_loop(self, load: Iterator[Conversation], num_users: int) -> None:
        self._progress.start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_users):
                tasks.create_task(self._user(load))

    async def _user(self, load: Iterator[Conversation]) -> None:
        progress, limits = self._progress, self._limits
        while progress.now() < limits.seconds:
            is_over = limits.max_requests is not None and len(progress.outcomes) >= limits.max_requests
            if is_over or (conversation := next(load, None)) is None:
                return
            await self._converse((replace(conversation[0], at=progress.now()), *conversation[1:]))

    async def _converse(self, conversation: Conversation) -> None:
        said: list[int] = []
        for number, turn in enumerate(conversation):
            if number:
                await asyncio.sleep(turn.think_s)
                turn = replace(turn, at=self._progress.now())
            outcome = await self._one(turn, [*said, *turn.input_ids])
            if outcome.error:
                return
            answer = outcome.token_ids or turn.input_ids[:1] * outcome.num_tokens
            said += [*turn.input_ids, *answer]

    async def _one(self, offered: OfferedRequest, input_ids: list[int]) -> RequestOutcome:
        progress = self._progress
        origin = time.perf_counter()
        sent = origin - progress.start
        outcome = RequestOutcome(
            offered, sent, lag=max(0.0, sent - offered.at), num_prompt_tokens=len(input_ids), origin=origin
        )
        progress.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._transport.send(offered, input_ids, outcome)
            outcome.finish()
        except RequestFailed as error:
            outcome.fail(error.code, error.message)
        except (ValueError, KeyError, TypeError) as error:
            outcome.fail(UNREADABLE, f"the answer cannot be read: {type(error).__name__}: {error}")
        except TimeoutError:
            outcome.fail(TIMEOUT, f"no answer within {self._limits.timeout_s:g} s")
        except asyncio.CancelledError:
            outcome.fail(UNANSWERED, "the run was cut short")
            raise
        progress.num_ended += 1
        return outcome
