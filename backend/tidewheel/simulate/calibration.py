import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.batch import WeightVariant
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.record.recorded_events import AnyEvent, ApplyEvent, FailEvent, ScheduleEvent, StepFeatures
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.replay import Recording, engine_of
from tidewheel.workload.arrivals import FloatArray

MIN_STEPS = 50
KNOTS = tuple(2**exponent for exponent in range(1, 16))
_LINEAR = (
    "seconds_per_kv_byte", "seconds_per_chunk_pair", "seconds_per_row", "seconds_per_sample", "seconds_per_new_row",
    "seconds_per_encoder_token", "seconds_per_draft",
)  # fmt: skip
MIN_STEPS_PER_SEGMENT = 20  # fewer give a noisy slope


class TestedDrafts(NamedTuple):
    most: int = 0  # of a row
    num_tested: int = 0  # up to and with the first wrong one of each row
    num_accepted: int = 0


class MeasuredStep(NamedTuple):
    features: StepFeatures
    seconds: float  # from start to tokens
    turn_seconds: float | None  # from tokens to the next start; None: idle
    weights: WeightVariant = "full"
    drafts: TestedDrafts = TestedDrafts()


def calibrated(path: Path) -> CostModel:
    recording = Recording(path)
    _, info = engine_of(recording.header)
    return fit(measured_steps(recording.events()), path.stem, **facts_of(info))


def facts_of(info: EngineInfo) -> dict[str, Any]:
    return {
        "device": info.device,
        "weights_bytes": info.weights_bytes,
        "kv_bytes_per_token": info.kv_cache_bytes / info.num_cache_tokens,
        "kv_element_bytes": 1 if info.kv_cache_dtype else 4 if info.dtype == "float32" else 2,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
    }


def measured_steps(events: Iterable[AnyEvent]) -> list[MeasuredStep]:
    """Return durations of the steps in a recording. With two steps in flight, host time between steps is unknown."""
    steps: list[MeasuredStep] = []
    in_flight: deque[ScheduleEvent] = deque()
    last_end: float | None = None
    idle = True
    for event in events:
        match event:
            case ScheduleEvent(step_id=-1):
                idle = idle or not in_flight
            case ScheduleEvent():
                if not idle and not in_flight and steps and last_end is not None:
                    steps[-1] = steps[-1]._replace(turn_seconds=event.now - last_end)
                idle = False
                in_flight.append(event)
            case ApplyEvent() if in_flight:
                scheduled = in_flight.popleft()
                start = scheduled.now if last_end is None else max(scheduled.now, last_end)
                seconds, drafts = event.now - start, _tested_drafts(scheduled, event)
                steps.append(MeasuredStep(scheduled.features, seconds, None, scheduled.weights, drafts))
                last_end = event.now
            case FailEvent():
                in_flight.clear()
                idle = True
    return steps


def _tested_drafts(scheduled: ScheduleEvent, applied: ApplyEvent) -> TestedDrafts:
    """Return the drafts of a step, in which each row has an entry more than drafts."""
    counts = np.array(scheduled.drafts)
    if not counts.any() or not applied.tokens:
        total = int(counts.sum())
        return TestedDrafts(int(counts.max(initial=0)), total, total)  # without names, all are accepted
    firsts = np.cumsum(counts + 1) - (counts + 1)
    is_accepted = np.frombuffer(applied.tokens, dtype="<i4") >= 0
    accepted = np.maximum(np.add.reduceat(is_accepted, firsts, dtype=np.int64) - 1, 0)
    return TestedDrafts(int(counts.max()), int(np.minimum(accepted + 1, counts).sum()), int(accepted.sum()))


def fit(steps: Sequence[MeasuredStep], name: str, *, kv_bytes_per_token: float = 1.0, **facts: Any) -> CostModel:
    """Return a cost model by least squares with coefficients >= 0; `facts`: other fields of `CostModel`.

    Raise `ConfigError` for fewer than `MIN_STEPS` steps of full weights.
    """
    quantized = [step for step in steps if step.weights == "quantized"]
    steps = [step for step in steps if step.weights == "full"]
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} measured steps are too few to calibrate a cost model: at least {MIN_STEPS}")
    features = np.array([step.features[:-1] for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps])
    rows, tokens, samples, new_rows, kv_tokens, pairs, encoded = features.T
    knots = choose_knots(tokens)
    terms = [np.ones_like(tokens), *_segments(tokens, knots), kv_tokens * kv_bytes_per_token]
    terms += [pairs, rows, samples, new_rows, encoded, np.array([step.drafts.most for step in steps])]
    design = np.stack(terms, axis=1)
    values = nonnegative_least_squares(design, seconds)
    num_linear = len(_LINEAR)
    overhead_s, *slopes = values[:-num_linear].tolist()
    turn_overhead_s, turn_per_row = _fit_turn(steps).tolist()
    model = CostModel(
        name=name,
        kv_bytes_per_token=kv_bytes_per_token,
        overhead_s=overhead_s,
        knots=knots,
        seconds_per_token=tuple(slopes),
        **dict(zip(_LINEAR, values[-num_linear:].tolist(), strict=True)),
        shapes=_fit_shapes(steps),
        turn_overhead_s=turn_overhead_s,
        turn_seconds_per_row=turn_per_row,
        **facts,
    )
    predicted = np.array([_predicted(model, step) for step in steps])
    share, acceptance = _quantized_share(quantized, model), _acceptance([step.drafts for step in steps])
    quality = _quality(seconds, predicted)
    return dataclasses.replace(model, fit=quality, quantized_share=share, draft_acceptance=acceptance)


def _predicted(model: CostModel, step: MeasuredStep) -> float:
    return model.step_seconds(step.features) + model.seconds_per_draft * step.drafts.most


def _acceptance(drafts: Sequence[TestedDrafts]) -> float | None:
    num_tested = sum(one.num_tested for one in drafts)
    return sum(one.num_accepted for one in drafts) / num_tested if num_tested else None


def _quantized_share(steps: Sequence[MeasuredStep], model: CostModel) -> float | None:
    weights = sum(model.weight_seconds(step.features) for step in steps)
    others = sum(_predicted(model, step) for step in steps) - weights
    share = (sum(step.seconds for step in steps) - others) / weights if weights > 0.0 else 0.0
    return share if share > 0.0 else None


def choose_knots(tokens: FloatArray) -> tuple[int, ...]:
    knots = [0]
    for knot in KNOTS:
        between = np.count_nonzero((tokens > knots[-1]) & (tokens <= knot))
        if min(between, np.count_nonzero(tokens > knot)) >= MIN_STEPS_PER_SEGMENT:
            knots.append(knot)
    return tuple(knots[1:])


def _segments(tokens: FloatArray, knots: tuple[int, ...]) -> list[FloatArray]:
    edges = (0.0, *knots, np.inf)
    return [np.clip(tokens - low, 0.0, high - low) for low, high in pairwise(edges)]


def _fit_turn(steps: Sequence[MeasuredStep]) -> FloatArray:
    busy = [(step.features.num_rows, step.turn_seconds) for step in steps if step.turn_seconds is not None]
    return _fit_line(busy) if busy else np.zeros(2)


def _fit_shapes(steps: Sequence[MeasuredStep]) -> dict[str, tuple[float, float]]:
    names = sorted({step.features.shape for step in steps} - {""})
    mine = {name: [step for step in steps if step.features.shape == name] for name in names}
    lines = {name: _fit_line([(one.features.num_tokens, one.seconds) for one in some]) for name, some in mine.items()}
    return {name: (float(overhead), float(slope)) for name, (overhead, slope) in lines.items()}


def _fit_line(points: Sequence[tuple[int, float]]) -> FloatArray:
    """Return overhead and slope."""
    counts, seconds = np.array(points, dtype=np.float64).T
    return nonnegative_least_squares(np.stack((np.ones_like(counts), counts), axis=1), seconds)


def _quality(measured: FloatArray, predicted: FloatArray) -> dict[str, float]:
    spread = float(((measured - measured.mean()) ** 2).sum())
    residual = float(((measured - predicted) ** 2).sum())
    return {
        "num_steps": float(len(measured)),
        "r_squared": 1.0 - residual / spread if spread > 0 else 1.0,
        "sum_error": float(predicted.sum() / measured.sum() - 1.0),
        "median_error": float(np.median(np.abs(predicted / measured - 1.0))),
    }


def nonnegative_least_squares(design: FloatArray, target: FloatArray) -> FloatArray:
    """Return an x >= 0 that minimises |design · x - target|; columns may be collinear.

    Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    """
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0.0] = 1.0
    matrix = design / scale
    num_terms = matrix.shape[1]
    solution = np.zeros(num_terms)
    is_free = np.zeros(num_terms, dtype=np.bool_)
    tolerance = 1e-10 * max(float(np.abs(matrix.T @ target).max()), 1e-300)
    for _ in range(3 * num_terms):  # practical bound of the authors
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[is_free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        is_free[best] = True
        solution = _step_inside(matrix, target, solution, is_free)
    return np.asarray(solution / scale)


def _step_inside(
    matrix: FloatArray, target: FloatArray, solution: FloatArray, is_free: npt.NDArray[np.bool_]
) -> FloatArray:
    while True:
        candidate = np.zeros_like(solution)
        candidate[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        negative = is_free & (candidate <= 0.0)
        if not negative.any():
            return candidate
        distance = np.maximum(solution[negative] - candidate[negative], 1e-300)
        ratios = solution[negative] / distance
        solution = solution + ratios.min() * (candidate - solution)
        is_free &= solution > 1e-15 * max(float(np.abs(solution).max()), 1e-300)
        solution[~is_free] = 0.0
