"""Seconds of decodes by their number, measured at load where tokens are drafted."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from tidewheel.batch import NO_DRAFT, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.runner import warm_up
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.warm_up import LEAST_MEASURED, MEASURED_CONTEXT, measure_decodes

INFO = RunnerInfo(
    model="", architecture="", device="cpu", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256,
    block_size=16, num_blocks=64, weights_bytes=0,
)  # fmt: skip


class Engine:
    """Runs steps on a clock of its own: a step of n decodes takes `seconds[n]`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, *, slow: tuple[int, ...] = ()) -> None:
        self.now, self.seconds, self.slow = 0.0, seconds, slow  # numbers of steps that something else delays
        self.batches: list[ScheduledBatch] = []
        monkeypatch.setattr(warm_up.time, "perf_counter", lambda: self.now)

    def run(self, batch: ScheduledBatch) -> None:
        self.now += self.seconds * (1.0 + 0.1 * batch.num_decodes) * (9.0 if len(self.batches) in self.slow else 1.0)
        self.batches.append(batch)


def test_each_size_is_measured_without_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0.001, slow=(0, 6, 8, 12))
    measured = measure_decodes(INFO, engine.run)
    assert [size for size, _ in measured] == [1, 2, 4, 8, 16, 32, 64]
    assert [seconds for _, seconds in measured] == pytest.approx([0.001 * (1.0 + 0.1 * n) for n, _ in measured])


def test_a_larger_step_takes_no_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0.001, slow=(*range(12, 18),))  # all of four decodes
    seconds = [seconds for _, seconds in measure_decodes(INFO, engine.run)]
    assert seconds == sorted(seconds)
    assert seconds[2] == seconds[3]


def test_a_slow_model_is_measured_where_drafts_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 2.0)
    assert [size for size, _ in measure_decodes(INFO, engine.run)] == [1, 2, 4, LEAST_MEASURED]
    assert len(engine.batches) == 8


def test_ranks_run_the_same_steps_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (Engine(monkeypatch, seconds) for seconds in (2.0, 0.001))
    assert len(measure_decodes(INFO, fast.run, None)) == len(measure_decodes(INFO, slow.run, None)) == 7
    assert len(fast.batches) == len(slow.batches)


def test_rows_with_drafts_make_more_decodes_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0.001)
    measure_decodes(msgspec.structs.replace(INFO, max_num_seqs=3), engine.run)
    batch = next(batch for batch in engine.batches if batch.num_decodes == 8)
    assert batch.rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (batch.start_positions - MEASURED_CONTEXT).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (batch.draft_tokens == NO_DRAFT).tolist() == [True, False, False, True, False, False, True, False]
    assert batch.num_tokens == 8
    first = next(batch for batch in engine.batches if batch.num_decodes == 1)
    assert not len(first.draft_tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 40])
def test_a_short_context_measures_what_it_can(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    engine = Engine(monkeypatch, 0.001)
    measured = measure_decodes(msgspec.structs.replace(INFO, max_model_len=length, max_num_seqs=1), engine.run)
    assert measured
    assert all((batch.start_positions < length).all() for batch in engine.batches)


def test_they_are_measured_only_where_tokens_are_drafted(config: EngineConfig) -> None:
    config = dataclasses.replace(config, max_num_seqs=3)
    assert ModelRunner.load(config).info.decode_seconds == []
    measured = ModelRunner.load(dataclasses.replace(config, speculation="prompt_lookup")).info.decode_seconds
    sizes, seconds = np.array(measured).T
    assert sizes[:4].tolist() == [1, 2, 4, 8]
    assert (seconds > 0.0).all()
