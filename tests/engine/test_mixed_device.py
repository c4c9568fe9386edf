"""Text, pictures of many steps and speech on one device: all are served, and none waits beyond a bound.

Schedulers, engine loops and turns are real; the clock is made up, and a step moves it by a formula.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_request, make_scheduler
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.engine.core import EngineCore
from tidewheel.engine.shared_device import AGEING_S, CREDIT_S, DeviceArbiter, DeviceShare
from tidewheel.one_shot.runner import FinishedRun
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.scheduler import Scheduler

AUDIO = 100  # encoder tokens
TICK_S = 0.001
SHAPES = {"8x8": 0.002, "16x16": 0.005}  # seconds of a row's step
COSTS: dict[str, Callable[[ScheduledBatch], float]] = {
    "text": lambda batch: 0.004 + 0.0005 * batch.num_tokens,
    "image": lambda batch: 0.002 + SHAPES[batch.bucket] * len(batch.rows),
    "speech": lambda batch: 0.003 + 0.008 * sum(new.request.encoder_tokens for new in batch.new_rows) / AUDIO,
}


@dataclass
class Clock:
    now: float = 100.0


@dataclass(eq=False)
class Engine:
    """An engine whose steps take the time of its kind."""

    kind: str
    clock: Clock
    arbiter: DeviceArbiter
    scheduler: Scheduler
    since: float | None = None  # when it began to want a step
    longest_wait_s: float = 0.0
    longest_step_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    others: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core = EngineCore(
            self.scheduler, self, lambda _: None, arbiter=self.arbiter, clock=lambda: self.clock.now
        )

    def add(self, priority: Priority, size: int) -> None:
        now = self.clock.now
        name, fields = f"{self.kind}{len(self.requests)}", {"priority": priority, "arrival_time": now}
        bucket = list(SHAPES)[size % 2] if self.kind == "image" else ""
        encoder_tokens = AUDIO if self.kind == "speech" else 0
        prompt = 3 * size if self.kind == "text" else 1
        request = make_request(name, prompt, max_tokens=size, bucket=bucket, encoder_tokens=encoder_tokens, **fields)
        self.core.add_group([request])
        self.requests.append(request)

    def launch(self, batch: ScheduledBatch) -> FinishedRun:
        assert self.since is not None
        self.longest_wait_s = max(self.longest_wait_s, self.clock.now - self.since)
        seconds = COSTS[self.kind](batch)
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.clock.now += seconds
        self.since = None
        for other in self.others:
            other.turn()  # begins to wait
        return FinishedRun(SampledTokens(batch.step_id, np.zeros(len(batch.rows), np.int32)))

    def turn(self) -> None:
        if self.since is None and self.core.has_unfinished:
            self.since = self.clock.now
        self.core.step()


def make_engines(clock: Clock, folder: Path, policy: str) -> dict[str, Engine]:
    engines = {kind: make_engine(kind, clock, folder, policy) for kind in COSTS}
    for engine in engines.values():
        engine.others = [one for one in engines.values() if one is not engine]
    return engines


def make_engine(kind: str, clock: Clock, folder: Path, policy: str) -> Engine:
    share = DeviceShare(kind, is_one_shot=kind == "image")
    own: dict[str, Any] = {
        "text": {"max_num_batched_tokens": 64},
        "image": {"takes_turns": True, "least_cut_tokens": 1},
        "speech": {"max_num_batched_tokens": 2 * AUDIO},
    }[kind]
    own |= {"enable_prefix_caching": False, "max_waiting_tokens": 1 << 20, "policy": policy}
    scheduler = make_scheduler(num_blocks=64, block_size=512, **own)
    return Engine(kind, clock, DeviceArbiter(folder / "cpu", share, clock=lambda: clock.now), scheduler)


def bound_s(engine: Engine) -> float:
    """Return the longest wait: ageing, and of each other one a step and the most by which its share exceeds ours."""
    others = [one.longest_step_s for one in engine.others]
    return 3 * AGEING_S + sum(step_s + 8 * (CREDIT_S + engine.longest_step_s) for step_s in others) + 4 * TICK_S


FLOOD = [(kind, Priority.CRITICAL, 60, 0.0) for kind in ("text", "image") for _ in range(40)]
asked = st.lists(
    st.tuples(st.sampled_from(sorted(COSTS)), st.sampled_from(Priority), st.integers(1, 60), st.floats(0.0, 2.0)),
    min_size=4,
    max_size=24,
)


@given(asked, st.sampled_from(["fifo", "priority", "density"]))
@example([*FLOOD, ("speech", Priority.LOW, 20, 0.5)], "priority")
@example([*FLOOD, ("speech", Priority.LOW, 20, 0.5)], "density")
@settings(max_examples=10, deadline=None, derandomize=True)
def test_every_kind_has_all_its_steps_and_no_engine_waits_beyond_the_bound(
    requests: list[tuple[str, Priority, int, float]], policy: str
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        clock = Clock()
        engines = make_engines(clock, Path(folder), policy)
        for engine in engines.values():
            stack.callback(engine.arbiter.close)
        pending = sorted(requests, key=lambda one: one[3])
        while pending or any(engine.core.has_unfinished for engine in engines.values()):
            clock.now += TICK_S
            while pending and 100.0 + pending[0][3] <= clock.now:
                kind, priority, size, _ = pending.pop(0)
                engines[kind].add(priority, size)
            for engine in engines.values():
                engine.turn()
    for engine in engines.values():
        check_invariants(engine.scheduler)
        assert engine.longest_wait_s <= bound_s(engine)
        assert all(request.finish_reason is FinishReason.LENGTH for request in engine.requests)
        assert all(request.num_output_tokens == request.max_tokens for request in engine.requests)


@pytest.mark.parametrize("policy", ["fifo", "priority", "density"])
def test_a_critical_text_beside_the_other_kinds_waits_for_a_slice(tmp_path: Path, policy: str) -> None:
    clock = Clock()
    engines = make_engines(clock, tmp_path, policy)
    for index in range(40):
        engines["image"].add(Priority.LOW, 30 + index % 2)
        engines["speech"].add(Priority.LOW, 20)
    engines["text"].add(Priority.CRITICAL, 60)
    while not engines["text"].requests[0].is_finished:
        clock.now += TICK_S
        for engine in engines.values():
            engine.turn()
    others = max(engines[kind].longest_step_s for kind in ("image", "speech"))
    assert policy == "fifo" or engines["text"].longest_wait_s <= others + 3 * TICK_S
    for engine in engines.values():
        engine.arbiter.close()
