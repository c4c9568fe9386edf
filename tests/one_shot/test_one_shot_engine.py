"""The step loop over one-shot requests: the scheduler of text models, with batches of one bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.one_shot.fake_adapter import BAD, FakeAdapter
from support.scheduler.invariants import check_invariants
from tidewheel.batch import StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.core import EngineCore
from tidewheel.engine.messages import AddRequest, Delta, EngineInfo
from tidewheel.engine.requests import to_requests
from tidewheel.engine.shared_device import UnsharedDevice
from tidewheel.errors import DeadlineExceeded, InvalidRequest, ModelFailed, TidewheelError
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.tensor_reader import TensorOutputs, TensorReader
from tidewheel.one_shot import runner as runner_module
from tidewheel.one_shot.adapters import with_kind
from tidewheel.one_shot.runner import OneShotRunner
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import Arrays
from tidewheel.request import Request
from tidewheel.simulate.replay import Recording, replay, scheduler_of


class SharedDevice(UnsharedDevice):
    slice: float | None = 0.020

    @property
    def slice_s(self) -> float | None:
        return self.slice


class Engine:
    """An engine on a scripted clock; requests come as a front end's messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.adapter = FakeAdapter()
        self.config = EngineConfig.from_settings(with_kind({"model": "m.onnx", **settings}))
        signature = self.adapter.signature.with_settings({}, {"L": [2, 4]} if "buckets" in settings else {})
        monkeypatch.setattr(runner_module, "load_adapter", lambda config: (self.adapter, signature))
        runner = OneShotRunner.load(self.config)
        self.info: EngineInfo = engine_info(runner.info, self.config)
        self.now = 0.0
        self.scheduler = build_scheduler(self.config, self.info, lambda: self.now)
        self.core = EngineCore(self.scheduler, runner, self._deliver, clock=lambda: self.now)
        self.ended: dict[str, Request] = {}
        self.reader = TensorReader(self.info)

    def timed(self, run: Callable[[Arrays], Arrays], seconds: float) -> Callable[[Arrays], Arrays]:
        def spend(inputs: Arrays) -> Arrays:
            self.now += seconds * len(inputs["x"])
            return run(inputs)

        return spend

    def _deliver(self, outputs: StepOutputs) -> None:
        self.ended |= {request.request_id: request for request in outputs.finished}

    def message(self, x: np.ndarray, **parameters: object) -> AddRequest:
        source = ParameterSource(origin="request parameter", values=parameters)
        inputs, arrival_ns = PackedTensors.of({"x": x}), int(self.now * 1e9) + 1
        asked = GenerateRequest(task="infer", inputs=inputs, parameters=(source,), arrival_ns=arrival_ns)
        message = self.reader.read(7, asked).message
        assert message is not None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=AddRequest)

    def add(self, request_id: str, *values: float, items: int = 1, **parameters: object) -> None:
        message = self.message(np.array([values] * items, np.float32), **parameters)
        self.core.add_group(
            to_requests(message, self.info, self.config, request_ids=[request_id], seed=0, now=self.now)
        )

    def run(self) -> list[tuple[int, ...]]:
        """Run to the end. Return the shapes that the model got."""
        before = len(self.adapter.shapes)
        while self.core.has_unfinished:
            self.now += 0.001
            self.core.step()
            check_invariants(self.scheduler)
        return self.adapter.shapes[before:]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    return lambda **settings: Engine(monkeypatch, **settings)


def test_waiting_requests_of_one_shape_are_one_batch(make: Callable[..., Engine]) -> None:
    engine = make()
    for name in "abc":
        engine.add(name, 4.0, 9.0)
    assert engine.run() == [(3, 2)]
    assert engine.ended["b"].outputs["y"].tolist() == [[2.0, 3.0]]
    assert {str(request.finish_reason) for request in engine.ended.values()} == {"length"}


def test_a_batch_has_one_bucket_and_the_first_in_line_sets_it(make: Callable[..., Engine]) -> None:
    engine = make()
    for name, size in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 3)):
        engine.add(name, *[4.0] * size)
    assert engine.run() == [(2, 1), (2, 2), (1, 3)]


def test_padding_makes_one_bucket_of_several_shapes(make: Callable[..., Engine]) -> None:
    engine = make(buckets='{"L": [2, 4]}')
    for name, size in (("a", 1), ("b", 2), ("c", 3)):
        engine.add(name, *[4.0] * size)
    assert engine.run() == [(2, 2), (1, 4)]
    assert [engine.ended[name].outputs["y"].shape for name in "abc"] == [(1, 1), (1, 2), (1, 3)]


def test_a_batch_holds_at_most_so_many_items_and_no_request_is_split(make: Callable[..., Engine]) -> None:
    engine = make(max_num_batched_tokens=4)
    for name, items in (("a", 3), ("b", 2), ("c", 2), ("d", 1)):
        engine.add(name, 4.0, items=items)
    assert engine.run() == [(3, 1), (4, 1), (1, 1)]
    with pytest.raises(InvalidRequest, match="batch dimension is 5"):
        engine.add("e", 4.0, items=5)


def test_a_larger_request_still_runs_after_the_limit_was_lowered(make: Callable[..., Engine]) -> None:
    engine = make(max_num_batched_tokens=4)
    engine.add("a", 4.0, items=3)
    from tidewheel.engine.build import scheduler_config, session_limits

    lower = EngineConfig.from_settings(with_kind({"model": "m.onnx", "max_num_batched_tokens": 2}))
    engine.scheduler.reconfigure(scheduler_config(lower, engine.info), session_limits(lower))
    engine.add("b", 4.0, items=1)
    assert engine.run() == [(3, 1), (1, 1)]


def test_batches_are_cut_to_a_slice_by_measured_time(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(record=str(tmp_path))
    device = engine.core.arbiter = SharedDevice()
    engine.adapter.run = engine.timed(engine.adapter.run, 0.006)  # type: ignore[method-assign]
    for number in range(9):
        engine.add(str(number), 4.0)
    engine.add("large", 4.0, items=5)
    assert [shape[0] for shape in engine.run()] == [1, 3, 3, 2, 5]
    device.slice = None
    for number in range(9):
        engine.add(str(number), 4.0)
    assert [shape[0] for shape in engine.run()] == [9]
    engine.scheduler._recorder.flush()  # type: ignore[attr-defined]
    (path,) = tmp_path.iterdir()
    assert not replay(Recording(path), scheduler_of(Recording(path).header)).difference


@pytest.mark.parametrize(("seconds", "slow"), [(0.1, True), (0.001, False)])
def test_an_item_longer_than_a_slice_is_named_at_load(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float,
    slow: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(runner_module.timeit, "repeat", lambda run, number, repeat: [run() and seconds] * repeat)
    make(buckets='{"L": [2, 4]}')
    assert ("one item takes 100 ms, longer than a slice" in caplog.text) == slow


def test_urgent_requests_come_first(make: Callable[..., Engine]) -> None:
    engine = make(max_num_seqs=1)
    engine.add("low", 1.0, priority=4)
    engine.add("normal", 1.0, 1.0)
    engine.add("critical", 1.0, 1.0, 1.0, priority=1)
    assert engine.run() == [(1, 3), (1, 2), (1, 1)]


def test_a_batch_waits_for_companions(make: Callable[..., Engine]) -> None:
    engine = make(scheduling_strategy="static", batch_size=3, batch_timeout_ms=50)
    engine.add("a", 4.0)
    engine.now += 0.010
    assert engine.core.step() is False
    engine.add("b", 4.0)
    engine.add("c", 4.0)
    assert engine.run() == [(3, 1)]
    engine.add("d", 4.0)
    engine.now += 0.051
    assert engine.run() == [(1, 1)]


def test_a_deadline_ends_a_waiting_request(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add("a", 4.0, deadline_ms=5)
    engine.now += 0.006
    engine.core.step()
    assert isinstance(engine.ended["a"].error, DeadlineExceeded) and not engine.adapter.shapes


def test_a_bad_neighbour_and_its_error(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add("good", 4.0)
    engine.add("bad", BAD)
    engine.add("nan", -3.0)
    engine.run()
    tags = {name: request.error and request.error.tag for name, request in engine.ended.items()}
    assert tags == {"good": None, "bad": "TW-MODEL", "nan": "TW-NUMERIC"}
    assert isinstance(engine.ended["bad"].error, ModelFailed)
    delta = Delta.of(7, 0, engine.ended["good"], [0])
    assert delta.outputs is not None and delta.outputs.arrays["n"].tolist() == [1]
    assert Delta.of(7, 0, engine.ended["bad"], []).error is not None


def test_estimates_learn_seconds_by_items(make: Callable[..., Engine]) -> None:
    engine = make()
    for _ in range(20):
        engine.add("a", 4.0, items=4)
        engine.run()
    assert engine.scheduler.step_time.longest_seconds(4) is not None


@pytest.mark.parametrize(
    ("parameters", "word"),
    [({"priority": 9}, "priority"), ({"temperature": 1.0}, "temperature"), ({"nonsense": 1}, "nonsense")],
)
def test_parameters_are_those_of_every_model(make: Callable[..., Engine], parameters: dict, word: str) -> None:
    with pytest.raises(TidewheelError, match=word):
        make().add("a", 4.0, **parameters)


def test_an_engine_checks_what_a_front_end_sends(make: Callable[..., Engine]) -> None:
    engine = make()
    message = engine.message(np.zeros((1, 2), np.float32))
    for wrong in (
        msgspec.structs.replace(message, inputs=None),
        msgspec.structs.replace(message, prompt=bytes(8)),
        msgspec.structs.replace(message, inputs=PackedTensors.of({"x": np.zeros((1, 2))})),
    ):
        with pytest.raises(InvalidRequest):
            to_requests(wrong, engine.info, engine.config, request_ids=["a"], seed=0, now=0.0)


def test_a_recording_replays_with_its_buckets(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(record=str(tmp_path))
    for name, size in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        engine.add(name, *[4.0] * size)
    engine.run()
    engine.scheduler._recorder.flush()  # type: ignore[attr-defined]
    (path,) = tmp_path.iterdir()
    recording = Recording(path)
    result = replay(recording, scheduler_of(recording.header))
    assert (result.difference, result.num_steps, result.num_requests) == ("", 2, 4)


@pytest.mark.parametrize(("reason", "tag"), [("deadline", "TW-DEADLINE"), ("cancelled", "TW-CANCELLED")])
def test_an_end_without_outputs_is_an_error(reason: str, tag: str) -> None:
    assert TensorOutputs(1).end(reason).tag == tag
