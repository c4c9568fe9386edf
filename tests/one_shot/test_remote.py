"""An engine whose front ends run the batches: made-up front ends say what they are told, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from support.scheduler.invariants import check_invariants
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info, load_model_runner
from tidewheel.engine.messages import (
    PROTOCOL,
    WHOLE_REQUEST,
    AddRequest,
    BatchDone,
    Cancel,
    Deltas,
    ErrorInfo,
    Goodbye,
    Hello,
    encoder,
    from_engine_decoder,
)
from tidewheel.engine.server import EngineServer
from tidewheel.errors import Busy, ConfigError, ModelFailed
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.tensor_reader import TensorReader
from tidewheel.one_shot.adapters import load_adapter, with_kind
from tidewheel.one_shot.runner import RemoteRunner
from tidewheel.one_shot.shared_tensors import PackedTensor, PackedTensors
from tidewheel.simulate.replay import Recording, replay, scheduler_of

TENSORS = {"inputs": [["x", "FP32", ["x.0", "x.1"]]], "outputs": [["y", "FP32", ["y.0", 2]]]}


def make_config(**settings: Any) -> EngineConfig:
    given = {"model": "called", "adapter": "triton", "adapter_options": json.dumps(TENSORS), **settings}
    return EngineConfig.from_settings(with_kind(given))


class MadeUp:
    """An engine and its front ends, on a scripted clock."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], **settings: Any) -> None:
        config, self.now = make_config(**settings), 1.0
        self.socket, self.context = context.socket(zmq.ROUTER), context
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind("inproc://engine")
        runner = load_model_runner(config)
        assert isinstance(runner, RemoteRunner)
        self.info = engine_info(runner.info, config)
        self.scheduler = build_scheduler(config, self.info, lambda: self.now)
        self.server = EngineServer(
            self.socket, self.scheduler, runner, self.info, config=config, clock=lambda: self.now
        )
        self.server.linger_s = 1e9
        self.reader = TensorReader(self.info)
        self.peers: dict[str, zmq.Socket[bytes]] = {}
        self.ends: dict[tuple[str, int], str] = {}  # finish reason, or the tag of the error

    def send(self, peer: str, *messages: Any) -> None:
        if peer not in self.peers:
            self.peers[peer] = self.context.socket(zmq.DEALER)
            self.peers[peer].connect("inproc://engine")
            self.peers[peer].send(encoder.encode(Hello(PROTOCOL, peer, "")))
        for message in messages:
            self.peers[peer].send(encoder.encode(message))

    def message(self, key: int, items: int = 1, size: int = 2, **parameters: object) -> AddRequest:
        inputs = PackedTensors([PackedTensor("x", "FP32", (items, size), 0)])
        source = ParameterSource(origin="request parameter", values=parameters)
        arrival_ns = int(1e9 * self.now)
        asked = GenerateRequest(task="infer", inputs=inputs, parameters=(source,), arrival_ns=arrival_ns)
        message = self.reader.read(key, asked).message
        assert message is not None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)

    def add(self, peer: str, *keys: int, **options: Any) -> None:
        self.send(peer, *[self.message(key, **options) for key in keys])

    def report(self, peer: str, *keys: int, error: Any = None) -> None:
        self.send(peer, BatchDone([(key, error and ErrorInfo.of(error)) for key in keys]))

    def run(self) -> dict[str, list[list[int]]]:
        """Turn the loop until nothing is left to do. Return the orders of each front end."""
        for _ in range(12):
            self.now += 0.001
            self.server._core.step()
            check_invariants(self.scheduler)
            self.server._front_ends.flush()
        orders: dict[str, list[list[int]]] = {}
        for peer, socket in self.peers.items():
            while socket.poll(0):
                message = from_engine_decoder.decode(socket.recv())
                if isinstance(message, Deltas) and message.to_run:
                    orders.setdefault(peer, []).append(message.to_run)
                for delta in message.deltas if isinstance(message, Deltas) else ():
                    assert (peer, delta.key) not in self.ends, "a second end"
                    self.ends[peer, delta.key] = delta.finish_reason if delta.error is None else delta.error.tag
        return orders

    def close(self) -> None:
        for socket in (*self.peers.values(), self.socket):
            socket.close(0)


@pytest.fixture
def make() -> Iterator[Callable[..., MadeUp]]:
    with zmq.Context() as context:
        made: list[MadeUp] = []
        yield lambda **settings: made.append(MadeUp(context, **settings)) or made[-1]
        for each in made:
            each.close()


def test_waiting_requests_of_one_shape_are_one_order(make: Callable[..., MadeUp]) -> None:
    it = make()
    it.add("a", 1, 2)
    it.add("a", 3, size=5)
    it.add("a", 4)
    assert it.run() == {"a": [[1, 2, 4], [3]]} and not it.ends
    it.report("a", 1, 2, 3, 4)
    assert it.run() == {}
    assert it.ends == {("a", key): "length" for key in (1, 2, 3, 4)}
    assert not it.server._core.has_unfinished


def test_each_front_end_gets_its_own_part_of_a_batch(make: Callable[..., MadeUp]) -> None:
    it = make()
    it.add("a", 1, 2)
    it.add("b", 1)
    assert it.run() == {"a": [[1, 2]], "b": [[1]]}
    it.report("b", 1)
    it.run()
    assert it.ends == {("b", 1): "length"}


def test_an_answer_waits_for_no_slower_one(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_seqs=2)
    it.add("a", 1, 2)
    it.run()
    for key in range(2, 40):
        it.add("a", key + 1)
        it.report("a", key)
        assert it.run() == {"a": [[key + 1]]}
        assert it.ends["a", key] == "length"
    it.report("a", 1, 40)
    it.run()
    assert it.ends["a", 1] == it.ends["a", 40] == "length"


def test_so_many_run_at_once_and_the_rest_by_class(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_seqs=2)
    it.add("a", 1, 2, 3, 4, priority=4)
    assert it.run() == {"a": [[1, 2]]}
    it.add("a", 5, priority=1)
    assert it.run() == {}, "a running call is taken back for an urgent request"
    it.report("a", 2)
    assert it.run() == {"a": [[5]]}
    it.report("a", 1, 5)
    assert it.run() == {"a": [[3, 4]]}


def test_a_batch_has_so_many_items(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_batched_tokens=4)
    it.add("a", 1, 2, 3, items=2)
    assert it.run() == {"a": [[1, 2], [3]]}


def test_a_batch_waits_for_companions(make: Callable[..., MadeUp]) -> None:
    it = make(scheduling_strategy="static", batch_size=2, batch_timeout_ms=30)
    it.add("a", 1)
    assert it.run() == {}
    it.add("a", 2)
    assert it.run() == {"a": [[1, 2]]}


@pytest.mark.parametrize(("error", "tag"), [(ModelFailed("no"), "TW-MODEL"), (Busy("full"), "TW-BUSY")])
def test_an_error_is_that_of_its_request(make: Callable[..., MadeUp], error: Exception, tag: str) -> None:
    it = make()
    it.add("a", 1, 2)
    it.run()
    it.report("a", 1, error=error)
    it.report("a", 2)
    it.run()
    assert it.ends == {("a", 1): tag, ("a", 2): "length"}


def test_a_cancelled_request_makes_room_and_its_report_is_ignored(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_seqs=1)
    it.add("a", 1, 2)
    it.run()
    it.send("a", Cancel([(1, WHOLE_REQUEST)]))
    assert it.run() == {"a": [[2]]}
    it.report("a", 1, 2, 1, 77)
    it.run()
    assert it.ends == {("a", 1): "cancelled", ("a", 2): "length"}


def test_a_deadline_ends_a_request_that_runs(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_seqs=1)
    it.add("a", 1, deadline_ms=30)
    it.add("a", 2)
    it.run()
    it.now += 0.1
    assert it.run() == {"a": [[2]]}
    assert it.ends == {("a", 1): "deadline"}


def test_a_front_end_that_leaves_costs_the_others_nothing(make: Callable[..., MadeUp]) -> None:
    it = make(max_num_seqs=3)
    it.add("gone", 1, 2)
    it.add("b", 1, 2)
    it.run()
    it.send("gone", Goodbye())
    assert it.run() == {"b": [[2]]}
    it.report("b", 1, 2)
    it.run()
    assert it.ends == {("b", 1): "length", ("b", 2): "length"} and not it.server._core.has_unfinished


def test_a_recording_replays(make: Callable[..., MadeUp], tmp_path: Path) -> None:
    it = make(record=str(tmp_path), max_num_seqs=2)
    it.add("a", 1, 2, 3)
    it.run()
    it.report("a", 2)
    it.run()
    it.report("a", 1, error=ModelFailed("no"))
    it.report("a", 3)
    it.run()
    it.scheduler._recorder.flush()  # type: ignore[attr-defined]
    (path,) = tmp_path.iterdir()
    recording = Recording(path)
    result = replay(recording, scheduler_of(recording.header))
    assert (result.difference, result.num_steps, result.num_requests) == ("", 2, 3)


def test_tensors_without_a_batch_are_one_item_each_and_may_differ(make: Callable[..., MadeUp]) -> None:
    it = make(batch_axes='{"x": null, "y": 0}', max_num_batched_tokens=8)
    it.add("a", 1, items=3)
    it.add("a", 2, size=7)
    assert it.run() == {"a": [[1, 2]]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buckets": '{"x.1": [4]}'}, ["buckets", "pads no tensors"]),
        ({"adapter_options": "{}"}, ["called", "declare both"]),
        ({"adapter_options": '{"inputs": [["x", "BF16", [1]]], "outputs": []}'}, ["adapter_options", "inputs"]),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_adapter(make_config(**settings))
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_tensors_stay_out_of_the_messages(make: Callable[..., MadeUp]) -> None:
    message = make().message(1, items=32, size=1 << 20)
    assert len(encoder.encode(message)) < 500
    assert np.prod(message.inputs.tensors[0].shape) == 32 << 20
