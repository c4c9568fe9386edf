"""The step loop over requests of many steps, with a fake model; requests come as a front end's messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.invariants import check_invariants
from tidewheel.batch import StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.core import EngineCore
from tidewheel.engine.messages import AddRequest, Delta
from tidewheel.engine.requests import to_requests
from tidewheel.errors import DeadlineExceeded, InvalidRequest, ModelFailed, NumericError, TidewheelError
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.output import Response
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.tensor_reader import TensorOutputs, TensorReader, encode_png
from tidewheel.one_shot.adapters import with_kind
from tidewheel.one_shot.runner import IterativeRunner
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import Arrays, Signature, StepOffer, StepOptions, TensorSpec
from tidewheel.request import FinishReason, Request

RAISES, BREAKS, UNDECODABLE, UNPREPARED = 100, 101, 102, 103  # labels


class Counting:
    """A state: the picture is a function of label, seed, guidance and the steps so far."""

    def __init__(self, label: int, value: float) -> None:
        self.label, self.value = label, value


class FakeModel:
    """x ← 1.5 x + label, from the seed on; remembers its batches."""

    device, weights_bytes = "cpu", 0
    offer = StepOffer(("2x2", "4x4"), 50, 4, 2.0)
    signature = Signature(
        (TensorSpec("label", "INT32", (1,)),),
        (TensorSpec("image", "UINT8", ("height", "width", 1)), TensorSpec("step", "INT32", (1,))),
    )

    def __init__(self) -> None:
        self.batches: list[int] = []

    def prepare(self, inputs: Arrays, seed: int, options: StepOptions) -> Counting:
        label = int(inputs["label"][0])
        if label == UNPREPARED:
            raise InvalidRequest("label is unknown")
        assert options.guidance_scale is not None
        return Counting(label, seed % 97 + options.guidance_scale)

    def step(self, states: Sequence[Counting]) -> list[bool]:
        if any(state.label == RAISES and state.value > 9 for state in states):
            raise RuntimeError("it broke\nhere")
        self.batches.append(len(states))
        for state in states:
            state.value = math.nan if state.label == BREAKS else (1.5 * state.value + state.label) % 256
        return [math.isfinite(state.value) for state in states]

    def decode(self, states: Sequence[Counting]) -> list[Arrays]:
        if any(state.label == UNDECODABLE for state in states):
            raise ValueError("no picture")
        return [{"image": np.full((2, 2, 1), int(state.value), np.uint8)} for state in states]


class Engine:
    def __init__(self, **changes: Any) -> None:
        self.model = FakeModel()
        self.config = EngineConfig.from_settings(with_kind({"model": "m", "adapter": "diffusers", **changes}))
        runner = IterativeRunner(self.model, self.config)
        self.info, self.now = engine_info(runner.info, self.config), 0.0
        self.scheduler = build_scheduler(self.config, self.info)
        self.core = EngineCore(self.scheduler, runner, self._deliver, clock=lambda: self.now)
        self.reader = TensorReader(self.info)
        self.outputs: dict[str, TensorOutputs] = {}
        self.answers: dict[str, list[Response]] = {}
        self.ended: dict[str, Request] = {}
        self.errors: dict[str, TidewheelError | None] = {}

    def message(self, label: int, *, stream: bool = True, **parameters: object) -> AddRequest:
        source = ParameterSource(origin="request parameter", values=parameters)
        inputs = PackedTensors.of({"label": np.array([label], np.int32)})
        asked = GenerateRequest(
            task="infer", inputs=inputs, parameters=(source,), stream=stream, arrival_ns=int(self.now * 1e9) + 1
        )
        prepared = self.reader.read(7, asked)
        assert prepared.message is not None and isinstance(prepared.outputs, TensorOutputs)
        self.prepared = prepared.outputs
        return msgspec.msgpack.decode(msgspec.msgpack.encode(prepared.message), type=AddRequest)

    def add(self, name: str, label: int = 1, **parameters: object) -> Request:
        message = self.message(label, **{"seed": 5, **parameters})
        self.outputs[name], self.answers[name] = self.prepared, []
        [request] = to_requests(message, self.info, self.config, request_ids=[name], seed=3, now=self.now)
        self.core.add_group([request])
        return request

    def _deliver(self, outputs: StepOutputs) -> None:
        for request in outputs.requests:
            if request.finish_reason is None:
                self._push(request, Delta.of(7, 0, request, [0]))
        for request in outputs.finished:
            delta = Delta.of(7, 0, request, [0] * (request in outputs.requests))
            self.ended[request.request_id] = request
            self.errors[request.request_id] = None if delta.error is None else delta.error.to_error()
            self._push(request, delta)

    def _push(self, request: Request, delta: Delta) -> None:
        outputs = self.outputs[request.request_id]
        outputs.push([msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta)])
        if outputs.has_tokens:
            self.answers[request.request_id].append(outputs.take())

    def step(self) -> None:
        self.core.step()
        self.now += 0.01
        check_invariants(self.scheduler)

    def run(self) -> None:
        while self.core.has_unfinished:
            self.step()

    def shown(self, name: str) -> list[tuple[int, int]]:
        """Return (step, first pixel) of each answer."""
        tensors = [response[0].tensors or {} for response in self.answers[name]]
        return [(int(each["step"][0]), int(each["image"][0, 0, 0])) for each in tensors]


def alone(label: int = 1, seed: int = 5, steps: int = 4, guidance: float = 2.0) -> int:
    value = seed % 97 + guidance
    for _ in range(steps):
        value = (1.5 * value + label) % 256
    return int(value)


def test_rows_at_different_steps_share_batches() -> None:
    engine = Engine()
    engine.add("a", steps=6)
    engine.step()
    engine.step()
    engine.add("b", label=2, steps=3, guidance_scale=0)
    engine.run()
    assert engine.model.batches == [1, 1, 2, 2, 2, 1]
    assert engine.shown("a") == [(6, alone(steps=6))]
    assert engine.shown("b") == [(3, alone(2, steps=3, guidance=0.0))]
    assert engine.answers["a"][0][0].finish_reason == "length"


def test_previews_come_between_the_steps_and_say_how_far_the_request_is() -> None:
    engine = Engine()
    engine.add("a", steps=5, preview_every=2)
    engine.run()
    assert engine.shown("a") == [(2, alone(steps=2)), (4, alone(steps=4)), (5, alone(steps=5))]
    tensors = [answer[0].tensors or {} for answer in engine.answers["a"]]
    assert [each["finish_reason"][0] for each in tensors] == [b"None", b"None", b"stop"]
    assert [each["steps"].tolist() for each in tensors] == [[5]] * 3
    assert engine.outputs["a"].num_output_tokens == [5]


@pytest.mark.parametrize(
    ("steps", "wanted", "shown"),
    [(20, 3, [5, 10, 15, 20]), (7, 2, [3, 6, 7]), (None, 9, [1, 2, 3, 4]), (1, 5, [1]), (6, 0, [6])],
)
def test_previews_are_spread_over_the_steps(steps: int | None, wanted: int, shown: list[int]) -> None:
    engine = Engine()
    engine.add("a", steps=steps, partial_images=wanted)
    engine.run()
    assert [step for step, _ in engine.shown("a")] == shown


@pytest.mark.parametrize(("on_deadline", "is_shown"), [("preview", True), ("error", False)])
def test_a_deadline_ends_a_request_as_its_owner_chose(on_deadline: str, is_shown: bool) -> None:
    engine = Engine()
    engine.add("a", steps=50, deadline_ms=45, on_deadline=on_deadline)
    engine.run()
    assert engine.ended["a"].finish_reason is FinishReason.DEADLINE
    assert len(engine.shown("a")) == is_shown
    if is_shown:
        [(step, value)] = engine.shown("a")
        assert (engine.answers["a"][0][0].tensors or {})["finish_reason"] == [b"deadline"]
        assert 1 <= step < 50 and value == alone(steps=step)
    else:
        assert isinstance(engine.outputs["a"].end("deadline"), DeadlineExceeded)


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine = Engine(max_num_seqs=1)
    low = engine.add("low", steps=6, priority=4)
    engine.step()
    engine.add("urgent", label=3, steps=2, priority=1)
    engine.run()
    assert low.num_preemptions == 1 and list(engine.ended) == ["urgent", "low"]
    assert engine.shown("low") == [(6, alone(steps=6))] and engine.shown("urgent") == [(2, alone(3, steps=2))]
    assert len(engine.model.batches) == 8


def test_a_cancel_ends_one_request() -> None:
    engine = Engine()
    engine.add("a", steps=9)
    engine.add("b", steps=4)
    engine.step()
    engine.core.cancel("a")
    engine.run()
    assert engine.ended["a"].finish_reason is FinishReason.CANCELLED
    assert engine.shown("b") == [(4, alone())]


@pytest.mark.parametrize(
    ("label", "kind", "words"),
    [
        (RAISES, ModelFailed, "RuntimeError: it broke here"),
        (BREAKS, NumericError, "step 1 is not finite"),
        (UNDECODABLE, ModelFailed, "no picture"),
        (UNPREPARED, InvalidRequest, "label is unknown"),
    ],
)
def test_a_failure_ends_only_its_request(label: int, kind: type[TidewheelError], words: str) -> None:
    engine = Engine()
    engine.add("good", steps=4)
    engine.add("bad", label=label, steps=4)
    engine.add("other", steps=3)
    engine.run()
    assert isinstance(engine.errors["bad"], kind) and words in str(engine.errors["bad"])
    assert engine.shown("good") == [(4, alone())] and engine.shown("other") == [(3, alone(steps=3))]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"steps": 0}, "steps is 0: it must be 1 to 50 (max_steps)"),
        ({"steps": 10_000}, "steps is 10000: it must be 1 to 50"),
        ({"size": "3x3"}, "size is '3x3': the model offers 2x2, 4x4"),
        ({"guidance_scale": -1}, "guidance_scale is -1: it must be 0 to 100"),
        ({"guidance_scale": "nan"}, "guidance_scale is nan: it must be finite"),
        ({"seed": -1}, "seed is -1: it must be 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed is 18446744073709551616: it must be 0 to"),
        ({"seed": 1.8446744073709552e19}, "exact only up to 9007199254740992: send it as text"),
        ({"on_deadline": "never"}, "on_deadline is 'never': it must be error or preview"),
        ({"format": "jpeg"}, "format is 'jpeg': it must be raw or png or png_base64"),
        ({"size": "8" * 99}, "size has 99 characters: at most 32 are allowed"),
        ({"steps": "many"}, "steps is 'many': it must be a number"),
        ({"step": 3}, "unknown parameter 'step': known are steps, size"),
        ({"temperature": 1}, "temperature"),
        ({"stream": False, "preview_every": 2}, "previews are set, and this model answers once"),
        ({"stream": False, "partial_images": 2}, "previews are set, and this model answers once"),
        ({"partial_images": -1}, "partial_images is -1: it must be 0 to 2147483647"),
    ],
)
def test_bad_parameters_are_named_in_one_line(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Engine().message(1, **parameters)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_engine_checks_what_a_front_end_sends() -> None:
    engine = Engine()
    message = msgspec.structs.replace(engine.message(1), step_options=StepOptions(steps=9))
    with pytest.raises(InvalidRequest, match="max_tokens 9"):
        to_requests(message, engine.info, engine.config, request_ids=["a"], seed=0, now=0.0)


def test_png_holds_the_picture() -> None:
    image_module = pytest.importorskip("PIL.Image")
    from io import BytesIO

    for channels in (1, 3, 4):
        image = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
        found = np.asarray(image_module.open(BytesIO(encode_png(image))))
        assert np.array_equal(found.reshape(image.shape), image)
    engine = Engine()
    engine.add("a", format="png")
    engine.run()
    tensors = engine.answers["a"][0][0].tensors or {}
    assert tensors.keys() == {"step", "steps", "finish_reason", "png"} and tensors["png"][0].startswith(b"\x89PNG")


asked = st.tuples(
    st.integers(0, 12),  # step of the arrival
    st.integers(1, 12),  # steps
    st.sampled_from(["2x2", "4x4"]),
    st.integers(1, 4),  # class
    st.integers(0, 5),  # label
    st.sampled_from([None, None, 40, 90]),  # deadline_ms
    st.sampled_from([None, None, None, 3]),  # steps until a cancel
)


@given(st.lists(asked, min_size=1, max_size=10), st.integers(1, 4))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_in_every_mixture_a_picture_is_the_one_that_its_request_gets_alone(
    mixture: list[tuple[Any, ...]], num_rows: int
) -> None:
    engine, arrivals = Engine(max_num_seqs=num_rows), sorted(enumerate(mixture), key=lambda pair: pair[1][0])
    cancels: list[tuple[int, str]] = []
    number = 0
    while arrivals or engine.core.has_unfinished:
        while arrivals and arrivals[0][1][0] <= number:
            index, (_, steps, size, priority, label, deadline, cancel) = arrivals.pop(0)
            parameters = {"deadline_ms": deadline, "on_deadline": "preview", "preview_every": 3}
            engine.add(str(index), label, steps=steps, size=size, priority=priority, **parameters)
            cancels += [(number + cancel, str(index))] if cancel else []
        for name in [name for moment, name in cancels if moment == number]:
            engine.core.cancel(name)
        engine.step()
        number += 1
    for index, (_, steps, _, _, label, deadline, cancel) in enumerate(mixture):
        shown = engine.shown(str(index))
        assert all(value == alone(label, steps=step) for step, value in shown)
        if deadline is None and cancel is None:
            assert shown[-1][0] == steps
