"""A modelled device does one thing after the other, and the parts of the host's work are told apart."""

from __future__ import annotations

import argparse
import itertools

import pytest
import torch

from common.clocks import ManualClock
from engine.host_timeline import Engine, Parts, Segment, seconds_by_step
from modelled.device import ModelledDevice, modelled_runner
from support.runner.step_loop import StepLoop, request


def test_work_is_queued_and_an_event_is_waited_for() -> None:
    clock = ManualClock()
    device = ModelledDevice(clock)
    clock.now = 1.0
    device.compute(2.0)
    event = device.event()
    event.record()
    device.compute(4.0)
    assert device.busy == [(1.0, 3.0), (3.0, 7.0)]
    event.synchronize()
    assert clock.now == 3.0
    clock.now = 10.0
    event.synchronize()
    device.compute(1.0)
    assert clock.now == 10.0 and device.busy[-1] == (10.0, 11.0)
    assert device.idle_fraction(1.0, 11.0) == pytest.approx(0.3)
    assert device.idle_fraction(2.0, 3.0) == 0.0


def test_a_graph_takes_as_long_as_what_it_captured() -> None:
    device = ModelledDevice(ManualClock())
    pool = device.graph_pool()

    def work() -> torch.Tensor:
        device.compute(2.0)
        return torch.zeros(1)

    graphs = [pool.capture(work).graph, pool.capture(lambda: torch.zeros(1)).graph]
    device.busy.clear()
    for graph in graphs:
        graph.replay()
    assert [end - begin for begin, end in device.busy] == [2.0]


def test_the_real_runner_drives_it() -> None:
    clock = ManualClock()
    device = ModelledDevice(clock)
    runner = modelled_runner(
        device, decode_seconds=1.0, prefill_seconds=0.25, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=128, graph_sizes=[1, 2, 4],
    )  # fmt: skip
    prompts = [torch.arange(length).int().numpy() for length in (4, 8, 12)]
    StepLoop(runner).run([request(str(i), prompt, 5) for i, prompt in enumerate(prompts)])
    assert [end - begin for begin, end in device.busy] == [24 * 0.25, 1.0, 1.0, 1.0, 1.0]
    assert clock.now == device.free_at == 10.0


def test_time_belongs_to_the_innermost_part() -> None:
    ticks = itertools.count()
    parts = Parts(lambda: float(next(ticks)))
    inner = parts.wrapped(lambda: None, "inner")
    parts.wrapped(lambda: [inner(), inner()], "outer")()
    assert parts.segments == [
        Segment("outer", 0.0, 1.0), Segment("inner", 1.0, 2.0), Segment("outer", 2.0, 3.0),
        Segment("inner", 3.0, 4.0), Segment("outer", 4.0, 5.0),
    ]  # fmt: skip
    assert parts.between(1.0, 4.0) == parts.segments[1:4]
    assert seconds_by_step(parts.segments, [0.0, 3.0, 5.0]) == {"outer": [2.0, 1.0], "inner": [1.0, 1.0]}


def test_every_part_of_a_step_is_seen() -> None:
    options = argparse.Namespace(running=4, context=16, steps=12, clock="cpu")
    engine = Engine(options, "tiny", is_async=True)
    run = engine.serve()
    assert set(run.host_us) == {segment.part for segment in engine.parts.segments} - {"device"}
    assert len(engine.device.busy) >= 5
