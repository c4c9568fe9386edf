"""What the loop of an engine does between two steps, and what it leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from support.engine.engine_clients import request
from support.engine.fake_engine import make_info
from support.engine.fake_runner import VOCAB_SIZE, FakeRunner
from support.engine.gated_compiler import LIMIT_S, GatedCompiler
from support.scheduler.scheduling import make_config
from tidewheel.config import EngineConfig
from tidewheel.engine.grammar_queue import GrammarQueue
from tidewheel.engine.messages import (
    PROTOCOL,
    WHOLE_REQUEST,
    Cancel,
    Deltas,
    Drain,
    FromEngine,
    Hello,
    Stats,
    encoder,
    from_engine_decoder,
)
from tidewheel.engine.server import RECEIVE_S, EngineServer
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request
from tidewheel.scheduler.scheduler import Scheduler

NUM_BLOCKS = 64


class WatchedScheduler(Scheduler):
    """Counts the checks of its cache, and notes the requests that have reached it. Its strategy is static."""

    def __init__(self) -> None:
        config = make_config(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=90, scheduling_strategy="static", batch_size=8
        )
        super().__init__(config, KVCacheManager(NUM_BLOCKS, 16, enable_prefix_caching=True))
        self.num_checks = 0
        self.added: list[str] = []

    def check_invariants(self) -> None:
        self.num_checks += 1

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        self.added += (request.request_id for request in requests)
        return super().add_group(requests, now)


class Loop:
    """A server whose clock moves by `tick` seconds at every look, and a front end that has said hello."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]], tick: float, **options: bool) -> None:
        info = make_info(folder, vocab_size=VOCAB_SIZE, max_model_len=90, num_blocks=NUM_BLOCKS)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind("inproc://loop")
        self.peer = context.socket(zmq.DEALER)
        self.peer.connect("inproc://loop")
        config = EngineConfig(model="m", scheduling_strategy="static", **options)
        self.scheduler = WatchedScheduler()
        ticks = itertools.count()
        self.paused_s = 0.0
        self.server = EngineServer(
            self.socket,
            self.scheduler,
            FakeRunner(num_rows=8, num_blocks=NUM_BLOCKS, block_size=16, token_budget=64),
            info,
            config=config,
            clock=lambda: self.paused_s + tick * next(ticks),
        )
        self.server.linger_s = 1e9
        self.peer.send(encoder.encode(Hello(PROTOCOL, "peer", "")))

    def turns(self, count: int) -> None:
        """Serve for so many turns of the loop."""
        left = itertools.count(count, -1)
        self.server._maintain = lambda _: "" if next(left) > 1 else "enough"  # type: ignore[method-assign]
        assert self.server.serve(lambda: "") == "enough"

    def received(self) -> list[FromEngine]:
        messages = []
        while self.peer.poll(0):
            messages.append(from_engine_decoder.decode(self.peer.recv()))
        return messages


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []
    with zmq.Context() as context:

        def make(tick: float, **options: bool) -> Loop:
            loops.append(Loop(tmp_path, context, tick, **options))
            return loops[-1]

        yield make
        for each in loops:
            each.socket.close(0)
            each.peer.close(0)


@pytest.mark.parametrize("debug_invariants", [False, True])
def test_the_loop_checks_the_whole_cache_only_where_it_is_told_to(
    loop: Callable[..., Loop], debug_invariants: bool
) -> None:
    """Checks even while requests wait and none may run, as they do for the batch of a static strategy."""
    it = loop(1e-6, debug_invariants=debug_invariants)
    it.peer.send(encoder.encode(request(1, 5, 6)))
    it.turns(5)
    assert it.scheduler.num_waiting == 1
    assert bool(it.scheduler.num_checks) == debug_invariants


def test_messages_between_two_steps_are_bounded_by_time(loop: Callable[..., Loop]) -> None:
    it = loop(RECEIVE_S / 4)
    added = it.scheduler.added
    for key in range(1, 41):
        it.peer.send(encoder.encode(request(key, 5, 6)))
    it.turns(1)
    assert 0 < len(added) <= 8
    it.turns(60)
    assert len(added) == 40


def test_a_message_that_takes_long_is_handled_all_the_same(loop: Callable[..., Loop]) -> None:
    it = loop(10 * RECEIVE_S)
    it.peer.send(encoder.encode(request(1, 5, 6)))
    it.turns(2)
    assert len(it.scheduler.added) == 1


def test_the_engine_does_not_count_its_own_pause_as_silence(loop: Callable[..., Loop]) -> None:
    it = loop(0.001)
    front_ends, keep_house = it.server._front_ends, it.server._maintain
    it.turns(2)
    for _ in range(3):
        it.paused_s += 5.6
        assert keep_house(lambda: "") == ""
        assert len(front_ends) == 1
    for _ in range(8):
        it.paused_s += 0.9
        keep_house(lambda: "")
    assert len(front_ends) == 0


def test_figures_come_before_the_last_answer(loop: Callable[..., Loop]) -> None:
    it = loop(1e-6)
    for key in range(1, 9):  # a whole batch of the static strategy
        it.peer.send(encoder.encode(request(key, 5, 3)))
    it.turns(20)
    *earlier, figures, last = (message for message in it.received() if isinstance(message, Stats | Deltas))
    assert isinstance(figures, Stats) and isinstance(last, Deltas)
    assert not any(isinstance(message, Stats) for message in earlier)
    assert figures.stats.num_running == 0
    assert sum(figures.stats.step_tokens.sums) == figures.stats.num_scheduled_tokens > 0
    assert sum(figures.stats.step_tokens.counts) == figures.stats.num_steps


def test_requests_that_wait_for_a_grammar(loop: Callable[..., Loop]) -> None:
    """A drain waits for them. One is cancelled, one too late, and one wrong."""
    it, compiler = loop(1e-6), GatedCompiler()
    it.server._grammars = GrammarQueue(compiler)
    ends = {"stop_token_ids": (2,), "end_token_ids": (2,), "grammar_name": "guided_regex"}
    it.peer.send(encoder.encode(request(1, 5, grammar="a", n=8, **ends)))  # a whole batch of the static strategy
    it.peer.send(encoder.encode(request(2, 5, grammar="a", **ends)))
    it.peer.send(encoder.encode(request(3, 5, grammar="a", deadline_ns=1, **ends)))
    it.peer.send(encoder.encode(request(4, 5, grammar="wrong", **ends)))
    it.peer.send(encoder.encode(Cancel([(2, WHOLE_REQUEST)])))
    it.peer.send(encoder.encode(Drain()))
    it.peer.send(encoder.encode(request(5, 5, grammar="a", **ends)))
    it.turns(2)
    messages = it.received()
    (figures,) = (message.stats for message in messages if isinstance(message, Stats))
    assert (figures.num_running, figures.num_waiting) == (0, 10)
    assert how_they_ended(messages) == {2: ["cancelled"], 5: ["TW-DRAINING"]}
    compiler.may_go_on.set()
    for _ in range(int(LIMIT_S * 1000)):  # each waits for a millisecond
        if not it.server._grammars.num_waiting:
            break
        it.turns(1)
    it.turns(30)
    assert how_they_ended(it.received()) == {1: ["length"] * 8, 3: ["TW-DEADLINE"], 4: ["TW-INPUT"]}


def how_they_ended(messages: list[FromEngine]) -> dict[int, list[str]]:
    """Return finish reasons, or tags of errors, by key."""
    ends: dict[int, list[str]] = {}
    for message in messages:
        for delta in message.deltas if isinstance(message, Deltas) else ():
            if delta.finish_reason:
                how = delta.finish_reason if delta.error is None else delta.error.tag
                ends.setdefault(delta.key, []).append(how)
    return ends
