"""Step times: what they are made of, and finding it again from measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.batch import ScheduledBatch
from tidewheel.errors import ConfigError
from tidewheel.record.recorded_events import StepFeatures, step_features
from tidewheel.simulate.calibration import MeasuredStep, fit, nonnegative_least_squares
from tidewheel.simulate.cost_model import H200_8B, CostModel


def step(num_tokens: int, *, num_rows: int | None = None, kv_tokens: int = 0, chunk_pairs: int = 0) -> StepFeatures:
    rows = num_tokens if num_rows is None else num_rows
    return StepFeatures(rows, num_tokens, rows, 0, kv_tokens, chunk_pairs)


def test_features_are_those_of_the_batch() -> None:
    batch = ScheduledBatch(
        step_id=0,
        rows=np.array([3, 1, 0], dtype=np.int32),
        start_positions=np.array([10, 0, 4], dtype=np.int32),
        num_scheduled_tokens=np.array([1, 3, 2], dtype=np.int32),
        samples=np.array([True, False, True]),
        num_decodes=1,
        num_tokens=6,
    )
    pairs = sum(position + 1 for position in (0, 1, 2)) + sum(position + 1 for position in (4, 5))
    assert step_features(batch) == StepFeatures(3, 6, 2, 0, 11 + 3 + 6, pairs)


def test_a_device_is_a_roofline() -> None:
    model = CostModel.from_device(
        "d",
        num_parameters=1e9,
        weights_bytes=2e9,
        kv_bytes_per_token=1e5,
        bytes_per_s=1e12,
        flops_per_s=1e14,
        launch_s=0.0,
    )
    assert model.step_seconds(step(1)) == pytest.approx(2e-3)  # reading the weights
    assert model.step_seconds(step(50)) == pytest.approx(2e-3)
    assert model.step_seconds(step(1000)) == pytest.approx(2e-2, rel=1e-6)  # 2 FLOPs per parameter and token
    assert model.step_seconds(step(1, kv_tokens=10_000)) == pytest.approx(3e-3)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_more_tokens_never_take_less_time(a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert H200_8B.step_seconds(step(low)) <= H200_8B.step_seconds(step(high))


def test_a_cache_of_8_bits_halves_what_is_read_and_doubles_the_blocks() -> None:
    narrow = H200_8B.with_cache("fp8_e4m3")
    assert H200_8B.with_cache("auto") is H200_8B
    assert narrow.num_blocks == 2 * H200_8B.num_blocks
    overhead = H200_8B.step_seconds(step(1))
    seconds = [model.step_seconds(step(1, kv_tokens=10_000)) - overhead for model in (H200_8B, narrow)]
    assert seconds[1] == pytest.approx(seconds[0] / 2)
    assert narrow.with_cache("fp8_e4m3") == narrow  # measured on such an engine


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    H200_8B.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == H200_8B


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read the cost model"),
        ('{"schema": 1, "name": "x", "overhead_s": 1, "quantized_share": 0}', "quantized_share is 0"),
        ('{"schema": 1, "name": "x", "overhead_s": 1, "draft_acceptance": 1.5}', "draft_acceptance is 1.5"),
        ('{"schema": 9}', "schema is not 1"),
        ('{"schema": 1, "name": "x", "overhead_s": -1}', "overhead_s has -1.0: it must be 0 or more"),
        ('{"schema": 1, "name": "x", "overhead_s": 1, "knots": [2]}', "1 knots need 2 slopes"),
        ('{"schema": 1, "name": "x"}', "overhead_s"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        CostModel.load(path)
    assert str(path) in str(caught.value)


def test_calibration_finds_the_model_that_made_the_steps() -> None:
    truth = CostModel(
        name="truth",
        overhead_s=0.004,
        knots=(16,),
        seconds_per_token=(1e-5, 2e-4),
        kv_bytes_per_token=100.0,
        seconds_per_kv_byte=1e-9,
        seconds_per_chunk_pair=3e-8,
        turn_overhead_s=2e-4,
        turn_seconds_per_row=1e-6,
    )
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(600):
        rows = int(rng.integers(1, 64))
        chunk = int(rng.integers(0, 200)) * int(rng.random() < 0.3)
        features = StepFeatures(
            rows,
            rows + chunk,
            rows - 1,
            int(rng.integers(0, 2)),
            int(rng.integers(rows, 40_000)),
            chunk * (chunk + 1) // 2,
        )
        noise = 1 + 0.02 * rng.standard_normal()
        steps.append(MeasuredStep(features, truth.step_seconds(features) * noise, truth.turn_seconds(rows)))
    found = fit(steps, name="found", kv_bytes_per_token=100.0)
    for probe in (
        step(1),
        step(12, kv_tokens=5000),
        step(60, kv_tokens=30_000),
        step(200, num_rows=3, chunk_pairs=20_000),
    ):
        assert found.step_seconds(probe) == pytest.approx(truth.step_seconds(probe), rel=0.05)
    assert found.turn_seconds(40) == pytest.approx(truth.turn_seconds(40), rel=1e-6)
    assert abs(found.fit["sum_error"]) < 0.01


def test_calibration_measures_the_share_of_steps_with_quantised_weights() -> None:
    truth = dataclasses.replace(H200_8B, quantized_share=0.6)
    steps = [
        MeasuredStep(features, truth.step_seconds(features, weights), None, weights)
        for rows in range(1, 80)
        for weights in ("full", "quantized")
        for features in (step(rows, kv_tokens=977 * rows % 5000),)
    ]
    found = fit(steps, name="found", kv_bytes_per_token=truth.kv_bytes_per_token)
    assert found.quantized_share == pytest.approx(0.6, rel=1e-3)
    assert found.fit["num_steps"] == 79
    assert fit([one for one in steps if one.weights == "full"], name="x").quantized_share is None


def test_calibration_measures_shapes_and_encoders() -> None:
    truth = dataclasses.replace(H200_8B, seconds_per_encoder_token=3e-6, shapes={"8x8": (0.004, 0.001)})
    pictures = [step(rows)._replace(shape="8x8") for rows in range(1, 60)]
    sounds = [step(rows)._replace(encoder_tokens=1500 * (rows % 4)) for rows in range(1, 60)]
    for features in (pictures, sounds):
        found = fit([MeasuredStep(one, truth.step_seconds(one), None) for one in features], name="found")
        for one in features:
            assert found.step_seconds(one) == pytest.approx(truth.step_seconds(one))
        assert list(found.shapes) == ["8x8"] * (features is pictures)


def test_few_steps_do_not_calibrate() -> None:
    with pytest.raises(ConfigError, match="3 measured steps are too few"):
        fit([MeasuredStep(step(1), 0.1, None)] * 3, name="x")


@given(st.integers(0, 1000))
def test_nonnegative_least_squares_meets_the_conditions_of_the_optimum(seed: int) -> None:
    """Kuhn and Tucker: no negative term, no gain from any term that is 0, none from a change of the others."""
    rng = np.random.default_rng(seed)
    design, target = rng.standard_normal((30, 6)), rng.standard_normal(30)
    solution = nonnegative_least_squares(design, target)
    gradient = design.T @ (target - design @ solution)
    assert (solution >= 0).all()
    assert (gradient[solution == 0] <= 1e-8).all()
    assert np.abs(gradient[solution > 0]).max(initial=0.0) < 1e-8
