from __future__ import annotations

import numpy as np
import pytest

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.one_shot.signature import Signature, TensorSpec

IMAGES = Signature(
    (TensorSpec("image", "FP32", ("N", 3, "H", "W")), TensorSpec("scale", "FP32", ("N", 1))),
    (TensorSpec("classes", "FP32", ("N", 10)),),
)
# A detector of speech: its state has the batch at axis 1, its rate has none.
SPEECH = Signature(
    (
        TensorSpec("input", "FP32", ("input.0", "input.1")),
        TensorSpec("state", "FP32", (2, "state.1", 4)),
        TensorSpec("sr", "INT64", (1,)),
    ),
    (TensorSpec("output", "FP32", ("output.0", 1)), TensorSpec("stateN", "FP32", (2, "stateN.1", 4))),
)


def axes(signature: Signature) -> dict[str, int | None]:
    return {spec.name: spec.batch_axis for spec in (*signature.inputs, *signature.outputs)}


def test_a_batch_is_the_first_dimension_if_all_tensors_have_it() -> None:
    assert axes(IMAGES.with_settings({}, {})) == {"image": 0, "scale": 0, "classes": 0}
    assert not SPEECH.with_settings({}, {}).is_batched
    other = Signature(IMAGES.inputs, (TensorSpec("boxes", "FP32", ("M", 4)),))
    assert not other.with_settings({}, {}).is_batched


def test_an_entry_names_other_axes() -> None:
    named = SPEECH.with_settings({"input": 0, "state": 1, "output": 0, "stateN": 1}, {})
    assert axes(named) == {"input": 0, "state": 1, "sr": None, "output": 0, "stateN": 1}


@pytest.mark.parametrize(
    ("batch_axes", "buckets", "words"),
    [
        ({"imgae": 0}, {}, ["batch_axes", "imgae", "image"]),
        ({"image": 1}, {}, ["batch_axes", "axis 1", "image"]),
        ({"classes": None}, {}, ["batch_axes", "output"]),
        ({}, {"Q": [1]}, ["buckets", "'Q'", "H"]),
    ],
)
def test_settings_that_do_not_fit_are_one_line(batch_axes: dict, buckets: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        IMAGES.with_settings(batch_axes, buckets)
    assert all(word in str(error.value) for word in words), error.value


def image(*shape: int, dtype: str = "FP32") -> tuple[str, str, tuple[int, ...]]:
    return "image", dtype, shape


SCALE = ("scale", "FP32", (2, 1))


def test_the_items_of_a_request_are_counted() -> None:
    assert IMAGES.with_settings({}, {}).check((image(2, 3, 8, 9), SCALE), 4) == 2
    assert (
        SPEECH.with_settings({}, {}).check(
            (("input", "FP32", (5, 512)), ("state", "FP32", (2, 5, 4)), ("sr", "INT64", (1,))), 1
        )
        == 1
    )


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([image(2, 3, 8, 8)], ["inputs", "scale"]),
        ([image(2, 3, 8, 8), SCALE, ("other", "FP32", (1,))], ["other"]),
        ([image(2, 3, 8, 8, dtype="FP64"), SCALE], ["image", "FP64", "FP32"]),
        ([image(2, 4, 8, 8), SCALE], ["image", "[2, 4, 8, 8]", "[N, 3, H, W]"]),
        ([image(2, 3, 8), SCALE], ["image", "[2, 3, 8]"]),
        ([image(3, 3, 8, 8), SCALE], ["batch dimension", "3 in image", "2 in scale"]),
        ([image(0, 3, 8, 8), ("scale", "FP32", (0, 1))], ["batch dimension is 0"]),
        ([image(5, 3, 8, 8), ("scale", "FP32", (5, 1))], ["batch dimension is 5", "1 to 4"]),
        ([image(2, 3, 8, 65), SCALE], ["dimension W", "65", "64"]),
    ],
)
def test_wrong_inputs_are_named(tensors: list, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        IMAGES.with_settings({}, {"W": [64, 16]}).check(tuple(tensors), 4)
    assert all(word in str(error.value) for word in words), error.value


def bucket(signature: Signature, **arrays: np.ndarray) -> str:
    return signature.bucket(arrays)


def test_requests_of_equal_padded_shapes_share_a_bucket() -> None:
    signature = IMAGES.with_settings({}, {"W": [16, 64]})
    scale = np.zeros((1, 1), np.float32)
    first = bucket(signature, image=np.zeros((1, 3, 8, 9), np.float32), scale=scale)
    assert first == bucket(signature, image=np.zeros((2, 3, 8, 16), np.float32), scale=scale)
    assert first != bucket(signature, image=np.zeros((1, 3, 8, 17), np.float32), scale=scale)
    assert first != bucket(signature, image=np.zeros((1, 3, 9, 9), np.float32), scale=scale)


def test_inputs_without_a_batch_must_be_equal_in_a_bucket() -> None:
    signature = SPEECH.with_settings({"input": 0, "state": 1, "output": 0, "stateN": 1}, {})

    def of(rate: int) -> str:
        return bucket(
            signature,
            input=np.zeros((1, 512), np.float32),
            state=np.zeros((2, 1, 4), np.float32),
            sr=np.array([rate]),
        )

    assert of(16000) == of(16000) != of(8000)
