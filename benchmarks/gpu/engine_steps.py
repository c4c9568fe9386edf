"""In-process engine with the times of deliveries."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from common.random_model import without_weights
from common.work_items import WorkItem, of_length
from gpu.stage import Stage
from modelled.roofline import SHAPES, Device, Shape, decode_seconds
from tidewheel import LLM, SamplingParams
from tidewheel.batch import StepOutputs


class Delivery(NamedTuple):
    at: float  # perf_counter
    request_ids: list[str]


class DecodeStep(NamedTuple):
    seconds: float
    batch: int
    context: float  # mean


class TimedLLM(LLM):
    """`LLM` that notes arrivals of tokens, for a list append a step."""

    deliveries: list[Delivery]

    def _deliver(self, outputs: StepOutputs) -> None:
        if outputs.requests:
            ids = [request.request_id for request in outputs.requests]
            self.deliveries.append(Delivery(time.perf_counter(), ids))
        super()._deliver(outputs)

    def timed(self, work: Sequence[WorkItem], temperature: float) -> Timed:
        """Generate all at once; raise RuntimeError for a short answer."""
        prompts, params = self._arguments(work, temperature)
        self.deliveries = []
        start = time.perf_counter()
        results = self.generate(prompts, params, use_tqdm=False)
        end = time.perf_counter()
        for item, result in zip(work, results, strict=True):
            if len(result.token_ids) != item.num_output_tokens:
                raise RuntimeError(f"{len(result.token_ids)} of {item.num_output_tokens} tokens: {result.error}")
        return Timed(start, end, [len(item.input_ids) for item in work], self.deliveries)

    def greedy(self, work: Sequence[WorkItem]) -> list[list[int]]:
        results = self.generate(*self._arguments(work, 0.0), use_tqdm=False)
        return [result.token_ids for result in results]

    def prompt_seconds(self, length: int, vocab: int, repeats: int) -> list[float]:
        """Return times to the first token of lone prompts, after a warm-up."""
        works = [of_length(1, length, 1, vocab, seed=seed) for seed in range(1 + repeats)]
        return [self.timed(work, 0.0).first_token_seconds()[0] for work in works][1:]

    @staticmethod
    def _arguments(
        work: Sequence[WorkItem], temperature: float
    ) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=item.num_output_tokens, ignore_eos=True)
            for item in work
        ]
        return [{"input_ids": item.input_ids} for item in work], params


class Timed(NamedTuple):
    """One run. The id of request i begins with "i."."""

    start: float
    end: float
    num_inputs: list[int]
    deliveries: list[Delivery]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def arrivals(self) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for delivery in self.deliveries:
            for request_id in delivery.request_ids:
                times.setdefault(request_id, []).append(delivery.at)
        return times

    def first_token_seconds(self) -> list[float]:
        return [times[0] - self.start for times in self.arrivals().values()]

    def gaps(self) -> list[float]:
        return [b - a for times in self.arrivals().values() for a, b in itertools.pairwise(times)]

    def decode_steps(self) -> list[DecodeStep]:
        """Return steps after all first tokens, when nothing is prefilled."""
        steps: list[DecodeStep] = []
        contexts: dict[str, int] = {}
        before: float | None = None
        for at, ids in self.deliveries:
            is_settled = len(contexts) == len(self.num_inputs)
            for request_id in ids:
                number = int(request_id.partition(".")[0])
                contexts[request_id] = contexts.get(request_id, self.num_inputs[number]) + 1
            if is_settled and before is not None:
                context = sum(contexts[request_id] - 1 for request_id in ids) / len(ids)
                steps.append(DecodeStep(at - before, len(ids), context))
            before = at if is_settled or len(contexts) == len(self.num_inputs) else None
        return steps


def limit_ratio(steps: Sequence[DecodeStep], shape: Shape, device: Device) -> float:
    """Return the steps' seconds over their least."""
    least = sum(decode_seconds(shape, step.batch, step.context, device) for step in steps)
    return sum(step.seconds for step in steps) / least


Engine = TypeVar("Engine", bound=TimedLLM)
MAX_NUM_SEQS = 256
OFFLINE: Mapping[str, object] = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 2304, "max_num_batched_tokens": 8192}
DRY: Mapping[str, object] = {"kv_cache_memory_mb": 64, "num_threads": 1, "max_num_batched_tokens": 256}


def settings_of(stage: Stage, **settings: object) -> dict[str, object]:
    """Return settings for weights made on the device; prefix caching would help later runs."""
    return {
        "device": stage.device.type, "dtype": "bfloat16", "load_format": "dummy", "enable_prefix_caching": False,
        "enforce_eager": stage.options.eager, **OFFLINE,
        **(DRY if stage.is_dry and not stage.is_cuda else {}), **settings,
    }  # fmt: skip


@contextlib.contextmanager
def open_engine(
    stage: Stage, model: str, folder: Path, *, kind: type[Engine] = TimedLLM, **settings: object
) -> Iterator[Engine]:
    chosen = settings_of(stage, **settings)
    source = without_weights(folder / model, SHAPES[model]) if chosen["load_format"] == "dummy" else folder
    start = time.perf_counter()
    engine = kind(str(source), skip_tokenizer_init=True, **chosen)
    try:
        stage.facts(
            model=model,
            ready_s=time.perf_counter() - start,
            num_blocks=engine.info.num_blocks,
            settings={key: value for key, value in chosen.items() if isinstance(value, str | int | float)},
        )
        engine.deliveries = []
        yield engine
    finally:
        engine.close()


def warm_up(engine: TimedLLM, work: Sequence[WorkItem], temperature: float) -> None:
    engine.timed([WorkItem(item.input_ids, min(item.num_output_tokens, 16)) for item in work[:8]], temperature)
