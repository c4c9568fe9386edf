from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from support.one_shot.fake_adapter import BAD, FakeAdapter
from tidewheel.batch import NewRow, SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ModelFailed, NumericError
from tidewheel.one_shot.adapters import Adapter, with_kind
from tidewheel.one_shot.runner import OneShotRunner
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams


def items(inputs: Arrays) -> np.ndarray:
    return np.zeros(len(next(iter(inputs.values()))), np.int32)


class Ran:
    """One step over requests with these inputs."""

    def __init__(self, adapter: Any, *inputs: Arrays, **options: Any) -> None:
        signature = adapter.signature.with_settings(options.pop("batch_axes", {}), options.pop("buckets", {}))
        config = EngineConfig.from_settings(with_kind({"model": "m.onnx", **options}))
        self.runner = OneShotRunner(adapter, signature, config)
        self.adapter = adapter
        self.step(*inputs)

    def step(self, *inputs: Arrays) -> None:
        self.requests = [
            Request(str(row), items(each), SamplingParams(), max_tokens=1, arrival_time=0.0, inputs=each)
            for row, each in enumerate(inputs)
        ]
        n = len(inputs)
        rows, ones = np.arange(n, dtype=np.int32)[::-1], np.ones(n, np.int32)
        new = tuple(NewRow(int(one.request_id), one, one.prompt_token_ids, one.sampling) for one in self.requests)
        batch = ScheduledBatch(5, rows, 0 * ones, ones, np.ones(n, np.bool_), 0, n, new)
        tokens = self.runner.launch(batch).wait()
        assert tokens.step_id == 5
        self.failed = [token == SampledTokens.NOT_FINITE for token in tokens.token_ids.tolist()[::-1]]
        assert all(request.inputs is None for request in self.requests)


def x(*rows: list[float]) -> dict[str, Any]:
    return {"x": np.array(rows, np.float32)}


def test_a_lone_request_runs_on_its_own_arrays() -> None:
    ran = Ran(FakeAdapter(), x([4.0, 9.0]))
    assert ran.requests[0].outputs["y"].tolist() == [[2.0, 3.0]] and ran.failed == [False]


def test_requests_are_joined_and_told_apart() -> None:
    ran = Ran(FakeAdapter(), x([4.0]), x([9.0], [0.0]), x([16.0]))
    assert ran.adapter.shapes == [(4, 1)]
    assert [request.outputs["y"].tolist() for request in ran.requests] == [[[2.0]], [[3.0], [0.0]], [[4.0]]]
    assert [request.outputs["n"].tolist() for request in ran.requests] == [[1], [1, 0], [1]]


@pytest.mark.parametrize("count", [1, 2])
def test_inputs_are_padded_to_their_bucket_and_outputs_cut(count: int) -> None:
    ran = Ran(FakeAdapter(), *[x([4.0, 9.0]), x([1.0, 4.0, 9.0])][:count], buckets={"L": [4, 8]})
    assert ran.adapter.shapes == [(count, 4)]
    assert [request.outputs["y"].tolist() for request in ran.requests] == [[[2.0, 3.0]], [[1.0, 2.0, 3.0]]][:count]


def test_an_input_without_a_batch_is_padded_in_its_first_dimension() -> None:
    signature = Signature((TensorSpec("x", "FP32", ("L",)),), (TensorSpec("n", "INT32", (1,)),))
    adapter = Adapter(signature, "cpu", 0, lambda inputs: {"n": np.array([inputs["x"].size], np.int32)})
    ran = Ran(adapter, {"x": np.ones(3, np.float32)}, buckets={"L": [4]})
    assert ran.requests[0].outputs["n"].tolist() == [4]


def test_one_request_that_raises_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ran = Ran(FakeAdapter(), x([4.0]), x([BAD]), x([9.0]))
    assert ran.failed == [False, True, False]
    assert ran.adapter.shapes == [(3, 1)] + [(1, 1)] * 3
    error = ran.requests[1].error
    assert isinstance(error, ModelFailed) and "RuntimeError: bad value in" in error.message
    assert ran.requests[2].outputs["y"].tolist() == [[3.0]]
    assert "RuntimeError: each is tried alone" in caplog.text and "bad value" not in caplog.text


def test_one_request_whose_output_is_not_finite_fails_alone() -> None:
    ran = Ran(FakeAdapter(), x([4.0]), x([-3.0]), x([9.0]))
    assert ran.failed == [False, True, False] and len(ran.adapter.shapes) == 1
    assert isinstance(ran.requests[1].error, NumericError) and "output y" in ran.requests[1].error.message
    ran = Ran(FakeAdapter(), x([-3.0]), check_finite=False)
    assert ran.failed == [False]


def test_a_finite_output_whose_sum_overflows_is_right() -> None:
    ran = Ran(FakeAdapter(), {"x": np.full((1, 1024), 6e4, np.float16)})
    assert ran.failed == [False]


class Detector(FakeAdapter):
    """Finds as many boxes as it likes, in a dimension that looks like a batch."""

    def run(self, inputs: Arrays) -> Arrays:
        found = super().run(inputs)
        return {"y": found["y"].repeat(2, axis=0), "n": found["n"]}


def test_outputs_of_another_size_end_joining(caplog: pytest.LogCaptureFixture) -> None:
    ran = Ran(Detector(), x([4.0]), x([9.0]))
    assert ran.failed == [False, False] and ran.adapter.shapes == [(2, 1), (1, 1), (1, 1)]
    assert ran.requests[1].outputs["y"].tolist() == [[3.0], [3.0]]
    assert "from now on each request runs alone" in caplog.text
    ran.step(x([4.0]), x([9.0]))
    assert ran.adapter.shapes[3:] == [(1, 1), (1, 1)]


class Speech(FakeAdapter):
    def __init__(self) -> None:
        x, state = TensorSpec("x", "FP32", ("x.0", 1)), TensorSpec("state", "FP32", (2, "b"))
        y, following = TensorSpec("y", "FP32", ("y.0", 1)), TensorSpec("next", "FP32", (2, "b"))
        super().__init__(Signature((x, state, TensorSpec("sr", "INT64", (1,))), (y, following)))

    def run(self, inputs: Arrays) -> Arrays:
        assert inputs["sr"].tolist() == [8]
        return {"y": inputs["x"] + inputs["state"][0][:, None], "next": inputs["state"] + 1}


def test_a_state_has_its_batch_at_another_axis() -> None:
    def window(value: float, state: float) -> Arrays:
        return {"x": np.float32([[value]]), "state": np.full((2, 1), state, np.float32), "sr": np.array([8])}

    axes = {"x": 0, "state": 1, "y": 0, "next": 1}
    ran = Ran(Speech(), window(1.0, 10.0), window(2.0, 20.0), batch_axes=axes)
    assert [request.outputs["y"].tolist() for request in ran.requests] == [[[11.0]], [[22.0]]]
    assert [request.outputs["next"].tolist() for request in ran.requests] == [[[11.0], [11.0]], [[21.0], [21.0]]]


def test_a_scalar_of_the_model_has_one_element_for_clients() -> None:
    signature = Signature((TensorSpec("x", "FP32", ()),), (TensorSpec("y", "FP32", ()),))

    class Scalars(FakeAdapter):
        def run(self, inputs: Arrays) -> Arrays:
            assert inputs["x"].shape == ()
            return {"y": np.sqrt(inputs["x"])}

    ran = Ran(Scalars(signature), {"x": np.array([9.0], np.float32)})
    assert ran.runner._signature.inputs[0].dims == (1,)
    assert ran.requests[0].outputs["y"].tolist() == [3.0]
