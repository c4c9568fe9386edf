"""A step loop whose deliveries are checked, and requests and cancels at random moments for it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from support.engine.fake_runner import FakeRunner, naive_output
from support.scheduler.scheduling import make_config, make_request
from tidewheel.batch import StepOutputs
from tidewheel.engine.core import EngineCore
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.scheduler import Scheduler

Event = tuple[str, object]  # add with a request, cancel with an id, idle


class Harness:
    """A core whose deliveries are checked: tokens in order, one end each, and the end that `naive_output` says."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_caching: bool = True,
        runner: type[FakeRunner] = FakeRunner,
        **changes: int,
    ) -> None:
        config = make_config(**changes)
        self.scheduler = Scheduler(
            config, KVCacheManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
        )
        self.runner = runner(
            num_rows=config.num_rows,
            num_blocks=num_blocks,
            block_size=block_size,
            token_budget=config.max_num_batched_tokens,
            salt_of=lambda request_id: self.requests[request_id].cache_salt,
        )
        self.now = 0.0
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            self.deliver,
            receive=self.receive,
            clock=lambda: self.now,
        )
        self.commands: deque[Callable[[], object]] = deque()  # one is carried out at each `receive`
        self.requests: dict[str, Request] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def add(self, request: Request) -> Request:
        self.core.add(request)
        self.requests[request.request_id] = request
        self.delivered[request.request_id] = []
        return request

    def play(self, events: Iterable[Event]) -> None:
        """One of them at each `receive`, from now on."""
        actions: dict[str, Callable[[Any], object]] = {
            "add": self.add,
            "cancel": self.core.cancel,
            "idle": lambda _: None,
        }
        self.commands.extend(functools.partial(actions[kind], value) for kind, value in events)

    def receive(self) -> None:
        self.now += 1.0
        if self.commands:
            self.commands.popleft()()

    def deliver(self, outputs: StepOutputs) -> None:
        for request, token_id in zip(outputs.requests, outputs.token_ids, strict=True):
            assert request.request_id not in self.ended
            self.delivered[request.request_id].append(token_id)
        for request in outputs.finished:
            assert request.request_id not in self.ended, "ended twice"
            assert request.finish_reason is not None
            self.ended[request.request_id] = request.finish_reason
            self.check_end(request)

    def check_end(self, request: Request) -> None:
        output, reason = naive_output(request)
        delivered = self.delivered[request.request_id]
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (delivered, request.finish_reason) == (output, reason)
        else:
            assert delivered == output[: len(delivered)]

    def run(self) -> None:
        for _ in range(5000):
            worked = self.core.step()
            self.core.check_invariants()
            if not worked and not self.commands:
                break
        assert not self.core.has_unfinished
        assert self.ended.keys() == self.requests.keys()
        stats = self.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Event]:
    """Each `receive`, of which a step has two, carries out one of these."""
    events: list[Event] = []
    for index in range(draw(st.integers(1, 14))):
        shared = draw(st.integers(0, 12))
        prompt = [7] * shared + draw(st.lists(st.integers(0, 39), min_size=1, max_size=14))
        request = make_request(
            str(index),
            prompt,
            max_tokens=draw(st.integers(1, 12)),
            min_tokens=draw(st.integers(0, 1)),
            priority=draw(st.sampled_from(Priority)),
            stop_token_ids=draw(st.sampled_from([(), (3, 4, 5), tuple(range(20))])),
            cache_salt=draw(st.sampled_from(["", "tenant"])),
        )
        events.append(("add", request))
        events += [("idle", None)] * draw(st.integers(0, 3))
        if draw(st.booleans()):
            events.append(("cancel", str(draw(st.integers(0, index)))))
    return events
