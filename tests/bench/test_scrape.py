"""Figures of the server from its metrics."""

from __future__ import annotations

import asyncio

import pytest

from tidewheel.bench import scrape
from tidewheel.bench.scrape import MetricsSampler, Sample, parse, summarise

ENGINE = """
# HELP tidewheel_steps_total Steps
# TYPE tidewheel_steps_total counter
tidewheel_steps_total{{engine="demo",model="demo",model_name="demo",version="1"}} {steps}
tidewheel_step_seconds_total{{model="demo"}} {seconds}
tidewheel_scheduled_tokens_total{{model="demo"}} {tokens}
vllm:generation_tokens_total{{model="demo"}} {generated}
vllm:generation_tokens_total{{model="other"}} 5000
vllm:num_requests_running{{model_name="another"}} 9
vllm:num_preemptions_total{{model="demo"}} {preemptions}
vllm:request_queue_time_seconds_sum{{model="demo"}} {queue}
vllm:request_queue_time_seconds_count{{model="demo"}} {queued}
vllm:kv_cache_usage_perc{{model="demo"}} {kv}
vllm:num_requests_running{{model="demo"}} {running}
"""
BEFORE = {
    "steps": 100, "seconds": 2.0, "tokens": 1000, "generated": 500, "preemptions": 1, "queue": 1.0, "queued": 10,
    "kv": 0.0, "running": 0,
}  # fmt: skip
AFTER = {
    "steps": 300, "seconds": 7.0, "tokens": 4000, "generated": 1300, "preemptions": 4, "queue": 3.0, "queued": 20,
    "kv": 0.5, "running": 6,
}  # fmt: skip
TRITON = """
nv_inference_count{{model="baseline",version="1"}} {count}
nv_inference_exec_count{{model="baseline",version="1"}} {executions}
nv_inference_queue_duration_us{{model="baseline",version="1"}} {queue}
nv_inference_count{{model="demo",version="1"}} 77
nv_cpu_utilization 0.75
"""


def test_an_engine_that_counts_its_steps() -> None:
    figures = summarise([parse(ENGINE.format(**v), "demo") for v in (BEFORE, AFTER)], seconds=10.0)
    assert figures["steps"] == 200
    assert figures["batch_size"] == pytest.approx(4.0)  # 800 tokens in 200 steps, none of another model
    assert figures["tokens_per_step"] == pytest.approx(15.0)
    assert figures["step_s"] == pytest.approx(0.025)
    assert figures["device_busy"] == pytest.approx(0.5)
    assert figures["preemptions"] == 3
    assert figures["queue_s"] == pytest.approx(0.2)
    assert figures["kv_use"] == pytest.approx(0.25)
    assert figures["kv_use_max"] == pytest.approx(0.5)
    assert figures["running_max"] == 6


def test_a_model_of_which_triton_itself_counts_the_batches() -> None:
    before = {"count": 0, "executions": 0, "queue": 0}
    after = {"count": 40, "executions": 5, "queue": 40 * 300_000}
    figures = summarise([parse(TRITON.format(**v), "baseline") for v in (before, after)], seconds=8.0)
    assert figures["batch_size"] == pytest.approx(8.0)
    assert figures["queue_s"] == pytest.approx(0.3)
    assert figures["cpu_utilization"] == pytest.approx(0.75)


def test_a_server_that_exports_nothing_tells_nothing() -> None:
    assert summarise([], 10.0) == {}
    assert summarise([{}, {}], 10.0) == {}
    assert parse("what is this\n<html>\n", "demo") == {}


@pytest.mark.parametrize(
    ("published", "num_scrapes", "steps"),
    [([5, 5, 5, 9, 9], 4, 4), ([5, 9, 9], 2, 4), ([5] * 30, 1 + scrape.MAX_FLUSHES, None)],
    ids=["late", "at once", "never"],
)
def test_the_last_sample_waits_for_the_steps_of_the_run(
    published: list[int], num_scrapes: int, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "FLUSH_S", 0.0)
    taken: list[Sample] = []

    async def answer(self: MetricsSampler) -> None:
        count = float(published[len(taken)])
        names = ("tidewheel_steps_total", "tidewheel_step_seconds_total", "tidewheel_scheduled_tokens_total")
        taken.append(dict.fromkeys(names, count))
        self.samples.append(taken[-1])

    monkeypatch.setattr(MetricsSampler, "_scrape", answer)

    async def run() -> MetricsSampler:
        async with MetricsSampler("http://127.0.0.1:9/metrics", "demo") as sampler:
            return sampler

    sampler = asyncio.run(run())
    assert len(taken) == num_scrapes
    assert len(sampler.samples) == 2
    assert sampler.figures(1.0).get("steps") == steps
