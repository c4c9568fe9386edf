"""A front end that runs requests when the engine says so, and answers when the engine says that they ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.engine.fake_engine import FakeEngine, RecordingSink, make_info
from support.frontend.front_ends import delta, error_info, stats
from tidewheel.errors import EngineDead, TidewheelError
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.frontend import Frontend
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.frontend.tensor_reader import TensorReader
from tidewheel.one_shot.shared_tensors import PackedTensor, PackedTensors
from tidewheel.one_shot.signature import Signature, TensorSpec

OUTPUTS = {"y": np.ones((1, 2))}


class Call:
    """A call whose end a test decides."""

    def __init__(self) -> None:
        self.outputs: Any = None
        self.is_discarded = False
        self.done: Callable[[TidewheelError | None], None] | None = None

    def start(self, done: Callable[[TidewheelError | None], None]) -> None:
        assert self.done is None, "started twice"
        self.done = done

    def discard(self) -> None:
        self.is_discarded = True

    def succeed(self) -> None:
        assert self.done is not None
        self.outputs = OUTPUTS
        self.done(None)


class Harness:
    def __init__(self, folder: Path) -> None:
        self.engine, self.frontend = FakeEngine(), Frontend(FrontendSettings(), AdmissionGate())
        signature = Signature((TensorSpec("x", "FP32", ("n", 2), 0),), (TensorSpec("y", "FP32", ("n", 2), 0),))
        info = msgspec.structs.replace(make_info(folder, vocab_size=1), signature=signature)
        self.frontend.start(info, TensorReader(info), self.engine)
        self._counts = itertools.count(1)

    def submit(self) -> tuple[int, Call, RecordingSink]:
        call, sink = Call(), RecordingSink()
        inputs = PackedTensors([PackedTensor("x", "FP32", (3, 2), 0)])
        self.frontend.submit(GenerateRequest(task="infer", inputs=inputs, call=call), sink)
        return self.engine.wait_added(next(self._counts))[-1], call, sink


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.frontend.close()


def test_a_call_starts_when_the_engine_says_so_and_its_outputs_are_the_answer(harness: Harness) -> None:
    key, call, sink = harness.submit()
    assert len(harness.engine.added[key].prompt) == 4 * 3 and call.done is None
    harness.frontend.on_run([key])
    call.succeed()
    assert harness.engine.reported == [(key, None)] and not sink.num_ends and not call.is_discarded
    harness.frontend.on_deltas([delta(key, [0], "length", stats=stats())])
    sink.wait_end()
    assert sink.error is None and sink.chunks[0].tensors is OUTPUTS
    assert call.is_discarded, "kept after the answer"


def test_the_error_of_the_engine_is_the_answer(harness: Harness) -> None:
    key, call, sink = harness.submit()
    harness.frontend.on_run([key])
    call.succeed()
    harness.frontend.on_deltas([delta(key, [], "error", error=error_info("TW-MODEL", "no"))])
    sink.wait_end()
    assert sink.error is not None and sink.error.tag == "TW-MODEL" and not sink.responses


@pytest.mark.parametrize(("reason", "tag"), [("length", "TW-CANCELLED"), ("deadline", "TW-DEADLINE")])
def test_an_end_without_outputs_is_an_error(harness: Harness, reason: str, tag: str) -> None:
    key, _, sink = harness.submit()
    harness.frontend.on_deltas([delta(key, [], reason)])
    sink.wait_end()
    assert sink.error is not None and sink.error.tag == tag


def test_a_request_that_is_gone_is_reported_so_that_the_engine_does_not_wait(harness: Harness) -> None:
    key, call, sink = harness.submit()
    sink.gone.set()
    sink.wait_end()
    assert call.is_discarded
    harness.engine.wait_cancelled(key)
    harness.frontend.on_run([key, 99])
    assert [reported for reported, _ in harness.engine.reported][-1] == 99


def test_an_engine_lost_while_a_call_runs_ends_the_request_once(harness: Harness) -> None:
    key, call, sink = harness.submit()
    harness.frontend.on_run([key])
    harness.frontend.on_lost([key], EngineDead("gone"))
    sink.wait_end()
    call.succeed()
    assert sink.num_ends == 1 and isinstance(sink.error, EngineDead)
