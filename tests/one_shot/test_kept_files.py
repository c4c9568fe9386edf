"""When a front end uses the shared memory of a request's tensors again: never while an engine may read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.engine.fake_engine import FakeEngine, RecordingSink, make_info
from support.frontend.front_ends import delta, error_info, stats
from tidewheel.errors import EngineDead
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.frontend import Frontend
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.frontend.tensor_reader import TensorReader
from tidewheel.one_shot.shared_tensors import INLINE_BYTES, PackedTensors, kept_files
from tidewheel.one_shot.signature import Signature, TensorSpec

X = {"x": np.ones((1, INLINE_BYTES), np.float32)}
Y = {"y": np.ones((1, 2), np.float32)}
End = Callable[[Frontend, int, RecordingSink], None]


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[tuple[FakeEngine, Frontend]]:
    engine, front_end = FakeEngine(), Frontend(FrontendSettings(), AdmissionGate())
    signature = Signature((TensorSpec("x", "FP32", ("n", INLINE_BYTES), 0),), (TensorSpec("y", "FP32", ("n", 2), 0),))
    info = msgspec.structs.replace(make_info(tmp_path, vocab_size=1), signature=signature)
    front_end.start(info, TensorReader(info), engine)
    yield engine, front_end
    front_end.close()
    kept_files.close()


def answers(front_end: Frontend, key: int, sink: RecordingSink) -> None:
    front_end.on_deltas([delta(key, [0], "length", stats=stats(), outputs=PackedTensors.of(Y))])


def refuses(front_end: Frontend, key: int, sink: RecordingSink) -> None:
    front_end.on_deltas([delta(key, [], "error", error=error_info("TW-MODEL", "no"))])


def is_lost(front_end: Frontend, key: int, sink: RecordingSink) -> None:
    front_end.on_lost([key], EngineDead("gone"))


def client_leaves(front_end: Frontend, key: int, sink: RecordingSink) -> None:
    sink.gone.set()


@pytest.mark.parametrize(
    ("end", "is_used_again"), [(answers, True), (refuses, True), (is_lost, False), (client_leaves, False)]
)
def test_memory_is_used_again_once_the_engine_has_ended_the_request(
    end: End, is_used_again: bool, front_end: tuple[FakeEngine, Frontend], shared_folder: Path
) -> None:
    engine, served = front_end
    sink, inputs = RecordingSink(), PackedTensors.of(X, keeps=True)
    served.submit(GenerateRequest(task="infer", inputs=inputs), sink)
    (key,) = engine.wait_added(1)
    end(served, key, sink)
    sink.wait_end()
    assert (PackedTensors.of(X, keeps=True).file == inputs.file) is is_used_again
    assert len(list(shared_folder.iterdir())) == 1


def test_memory_of_a_request_that_never_reached_the_engine_is_given_up(
    front_end: tuple[FakeEngine, Frontend], shared_folder: Path
) -> None:
    sink = RecordingSink()
    front_end[1].submit(GenerateRequest(task="infer", inputs=PackedTensors.of({"z": X["x"]}, keeps=True)), sink)
    sink.wait_end()
    assert sink.error is not None and not list(shared_folder.iterdir())
