"""A step loop whose deliveries are checked, and requests and cancels at random moments for it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from support.engine.fake_runner import FakeRunner
from support.engine.request_ledger import RequestLedger
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_config, make_request
from tidewheel.engine.core import EngineCore
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Priority, Request
from tidewheel.scheduler.scheduler import Scheduler

FIRST_STEP_S = 50.0
Event = tuple[str, object]  # add with a request, cancel with an id, idle


class CoreHarness(RequestLedger):
    """A core on a scripted clock, whose deliveries go into the ledger."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_caching: bool = True,
        runner: type[FakeRunner] = FakeRunner,
        **changes: int,
    ) -> None:
        super().__init__()
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
        self.beats: list[float] = []
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            self.take,
            receive=self.receive,
            beat=self.beats.append,
            first_step_s=FIRST_STEP_S,
            clock=lambda: self.now,
        )
        self.commands: deque[Callable[[], object]] = deque()  # one is carried out at each `receive`

    def add(self, request: Request) -> Request:
        self.core.add_group([request])
        self.accept(request)
        return request

    def play(self, events: Iterable[Event]) -> None:
        """Carry out one event at each `receive`, from now on."""
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

    def run(self) -> None:
        for _ in range(5000):
            worked = self.core.step()
            check_invariants(self.scheduler)
            if not worked and not self.commands:
                break
        assert not self.core.has_unfinished
        self.check_all_over(self.core.stats())


@st.composite
def arrivals(draw: st.DrawFn) -> list[Event]:
    """Draw requests and cancels; each `receive`, of which a step has two, carries out one event."""
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
