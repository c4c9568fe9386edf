"""Server figures of a run from `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping

import aiohttp

from tidewheel.bench.estimates import mean

INTERVAL_S = 1.0
FLUSH_S = 0.5  # most events are published by then
MAX_FLUSHES = 10
_TIMEOUT_S = 5.0

# Names of this engine and vLLM, then Triton's.
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_use",
    "nv_gpu_utilization": "gpu_utilization",
    "nv_cpu_utilization": "cpu_utilization",
}
_STEPS = "tidewheel_steps_total"
_COUNTERS = (
    _STEPS, "tidewheel_step_seconds_total", "tidewheel_scheduled_tokens_total",
    "vllm:num_preemptions_total", "vllm:generation_tokens_total",
    "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count",
    "nv_inference_count", "nv_inference_exec_count", "nv_inference_queue_duration_us",
)  # fmt: skip
Sample = dict[str, float]


def parse(text: str, model: str) -> Sample:
    """Sum a model's series by name; series without a model count too."""
    sample: Sample = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        is_of_model = not model or "model" not in labels or re.search(rf'model(_name)?="{re.escape(model)}"', labels)
        if (name in _GAUGES or name in _COUNTERS) and is_of_model:
            with contextlib.suppress(ValueError):
                sample[name] = sample.get(name, 0.0) + float(value)
    return sample


def summarise(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Return figures of a run between the first sample and the last."""
    if len(samples) < 2:
        return {}
    first, last = samples[0], samples[-1]
    grown = {name: last[name] - first.get(name, 0.0) for name in _COUNTERS if name in last}
    figures = _of_engine(grown, seconds) or _of_triton(grown)
    for gauge, figure in _GAUGES.items():
        if seen := [sample[gauge] for sample in samples if gauge in sample]:
            figures[figure] = mean(seen)
            figures[f"{figure}_max"] = max(seen)
    return figures


def _of_engine(grown: Mapping[str, float], seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    if steps := grown.get(_STEPS):
        busy_s = grown["tidewheel_step_seconds_total"]
        figures |= {"steps": steps, "step_s": busy_s / steps, "device_busy": busy_s / seconds}
        figures["batch_size"] = grown.get("vllm:generation_tokens_total", 0.0) / steps
        figures["tokens_per_step"] = grown["tidewheel_scheduled_tokens_total"] / steps
    if queued := grown.get("vllm:request_queue_time_seconds_count"):
        figures["queue_s"] = grown["vllm:request_queue_time_seconds_sum"] / queued
    if "vllm:num_preemptions_total" in grown:
        figures["preemptions"] = grown["vllm:num_preemptions_total"]
    return figures


def _of_triton(grown: Mapping[str, float]) -> dict[str, float]:
    """Use Triton's counters; they give no time of execution, as a batch's counts once per request."""
    executions, count = grown.get("nv_inference_exec_count"), grown.get("nv_inference_count")
    if not executions or not count:
        return {}
    return {
        "steps": executions,
        "batch_size": count / executions,
        "queue_s": grown["nv_inference_queue_duration_us"] * 1e-6 / count,
    }


class MetricsSampler:
    """Scraper around a run: `async with Sampler(url, model) as sampler`."""

    def __init__(self, url: str | None, model: str) -> None:
        self._url = url
        self._model = model
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.samples: list[Sample] = []

    async def __aenter__(self) -> MetricsSampler:
        if self._url is not None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
            await self._scrape()
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None or self._session is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        try:
            await self._scrape_the_end()
        finally:
            await self._session.close()

    def figures(self, seconds: float) -> dict[str, float]:
        return summarise(self.samples, seconds)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._scrape()

    async def _scrape_the_end(self) -> None:
        """Take a last sample once it has steps, published late under load."""
        before = list(self.samples)
        for _ in range(MAX_FLUSHES):
            await asyncio.sleep(FLUSH_S)
            self.samples = list(before)
            await self._scrape()
            steps = [sample.get(_STEPS, 0.0) for sample in self.samples]
            if len(steps) < 2 or _STEPS not in self.samples[-1] or steps[-1] != steps[0]:
                return

    async def _scrape(self) -> None:
        assert self._session is not None and self._url is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(self._url) as answer:
                text = await answer.text(errors="replace")
            self.samples.append(parse(text, self._model))
