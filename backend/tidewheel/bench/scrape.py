import asyncio
import contextlib
from collections.abc import Mapping

import aiohttp

from tidewheel import metrics
from tidewheel.bench.estimates import mean
from tidewheel_client import Figures

INTERVAL_S = 1.0
FLUSH_S = 0.5  # most events are published by then
MAX_FLUSHES = 10
_TIMEOUT_S = 5.0

_GAUGES = {
    metrics.RUNNING.name: "running",
    metrics.WAITING.name: "waiting",
    metrics.KV_USAGE.name: "kv_use",
    metrics.TRITON_GPU_USE.name: "gpu_utilization",
    metrics.TRITON_CPU_USE.name: "cpu_utilization",
}
_STEPS, _STEP_SECONDS = metrics.STEPS.name, metrics.STEP_SECONDS.name
_SCHEDULED, _GENERATED = metrics.SCHEDULED_TOKENS.name, metrics.GENERATION_TOKENS.name
_PREEMPTIONS = metrics.PREEMPTIONS.name
_QUEUE_SUM, _QUEUE_COUNT = (f"{metrics.QUEUE_TIME.name}_{part}" for part in ("sum", "count"))
_INFERENCES, _EXECUTIONS = metrics.TRITON_INFERENCES.name, metrics.TRITON_EXECUTIONS.name
_TRITON_QUEUE = metrics.TRITON_QUEUE_TIME.name
_COUNTERS = (
    _STEPS, _STEP_SECONDS, _SCHEDULED, _GENERATED, _PREEMPTIONS, _QUEUE_SUM, _QUEUE_COUNT,
    _INFERENCES, _EXECUTIONS, _TRITON_QUEUE,
)  # fmt: skip
_NAMES = (*_GAUGES, *_COUNTERS)
Sample = dict[str, float]


def parse(text: str, model: str) -> Sample:
    """Return each metric's sum over series of `model` and series without a model. Raise `ValueError`."""
    # Other lines are left out first: parsing a thousand delays the load generator.
    figures = Figures.parse("".join(f"{line}\n" for line in text.splitlines() if line.startswith(_NAMES)))
    sample: Sample = {}
    for name in _NAMES:
        for found in figures.samples(name):
            models = {found.labels[label] for label in ("model", "model_name") if label in found.labels}
            if not model or not models or model in models:
                sample[name] = sample.get(name, 0.0) + found.value
    return sample


def summarise(samples: list[Sample], seconds: float) -> dict[str, float]:
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
        busy_s = grown[_STEP_SECONDS]
        figures |= {"steps": steps, "step_s": busy_s / steps, "device_busy": busy_s / seconds}
        figures["batch_size"] = grown.get(_GENERATED, 0.0) / steps
        figures["tokens_per_step"] = grown[_SCHEDULED] / steps
    if queued := grown.get(_QUEUE_COUNT):
        figures["queue_s"] = grown[_QUEUE_SUM] / queued
    if _PREEMPTIONS in grown:
        figures["preemptions"] = grown[_PREEMPTIONS]
    return figures


def _of_triton(grown: Mapping[str, float]) -> dict[str, float]:
    executions, count = grown.get(_EXECUTIONS), grown.get(_INFERENCES)
    if not executions or not count:
        return {}
    return {
        "steps": executions,
        "batch_size": count / executions,
        "queue_s": grown[_TRITON_QUEUE] * 1e-6 / count,
    }


class MetricsSampler:
    def __init__(self, url: str | None, model: str) -> None:
        self._url = url
        self._model = model
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.samples: list[Sample] = []

    async def __aenter__(self) -> "MetricsSampler":
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
        """Sample once more, until the engine's steps have grown: under load, engines publish late."""
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
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self._session.get(self._url) as answer:
                text = await answer.text(errors="replace")
            self.samples.append(parse(text, self._model))
