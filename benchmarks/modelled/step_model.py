"""Predicted seconds of steps on an H200, and the tokens per second that follow, before a device measures them.

    python benchmarks step_model --json

A step takes the longer of device and host, which works one step ahead. Every factor is measured, published or
estimated, as `FACTORS` says; estimates are ranges, and so are predictions. Host time of layers is measured by
`eager_layer.py` each time, and that of the rest of a step is read from `results/host_timeline.json`.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.study import RESULTS, Study, show
from modelled.roofline import H200, SHAPES, Device, Shape, workload_seconds
from tidewheel.runner.step_graphs import MOST_TOKENS, prompt_sizes

NUM_MULTIPROCESSORS = 132
RESIDENT_PROGRAMS = 3 * NUM_MULTIPROCESSORS  # of decode attention
KERNELS_PER_LAYER = 10  # with the merge of split keys
TILES = ((128, 128), (128, 64), (64, 64))
WORKLOAD = 256, (100, 1024)  # requests, all at once; input and output tokens
MAX_NUM_SEQS, BUDGET = 256, 8192
SERVED = 512, 128  # input and output tokens of a steady load
RUNNING = (8, 16, 32, 64, 128, 256)
CONTEXT = 512
BATCHES = {"qwen3-0.6b": 256, "llama-3.1-8b": 128}


class Factor(NamedTuple):
    slow: float
    fast: float
    unit: str
    basis: str  # measured, published or estimate
    reason: str


FACTORS = {
    "bandwidth": Factor(H200.copy_bandwidth, H200.copy_bandwidth, "bytes/s", "measured", "a copy on an H200"),
    "arithmetic": Factor(H200.flops, H200.flops, "FLOP/s", "measured", "a bf16 product of 8192 cubed on an H200"),
    "decode attention": Factor(
        0.82, 0.92, "of bandwidth", "estimate",
        "two of three buffers in flight hide the latency; nine barriers for each tile of 32 KB cost the rest",
    ),
    "decode attention, 8 bits": Factor(
        0.6, 0.9, "of bandwidth", "estimate",
        "half the bytes are in flight, all are converted, and values come out of shared memory byte by byte",
    ),
    "prompt attention": Factor(
        210e12, 488e12, "FLOP/s", "measured",
        "prompts of 1,024 and of 8,192 tokens on an H100 (gpu_nvidia_h100_80gb_hbm3_second, sweep, pointers)",
    ),
    "products": Factor(
        0.85, 0.97, "of the least time of full waves of tiles", "estimate",
        "cuBLAS; few rows give fewer tiles than there are multiprocessors, unless it splits the inner dimension",
    ),
    "products of 8 bits": Factor(
        1.4, 1.9, "times the arithmetic", "estimate",
        "twice the tensor instructions; CUTLASS with a scale for each row and column, sums in float32 outside of it",
    ),
    "start of a product": Factor(4e-6, 2e-6, "s", "estimate", "fill and drain of its pipeline, which nothing hides"),
    "start of a decode": Factor(
        2e-6, 1e-6, "s for each round of resident programs", "estimate",
        "length, block table, then keys: three trips to memory before the first product",
    ),
    "small kernels": Factor(0.6, 0.85, "of bandwidth", "estimate", "one pass over rows in 16-byte loads"),
    "kernel boundary": Factor(
        1.3e-6, 1.0e-6, "s", "published", "1.3 us in a CUDA graph on an H100 (Hazy Research, No Bubbles, 2025)"
    ),
    "sampling": Factor(0.5, 0.8, "of bandwidth", "estimate", "one pass over the logits, then short searches"),
    "between steps": Factor(15e-6, 10e-6, "s", "estimate", "a graph launch, and a copy of the inputs"),
    "driver and cuBLAS": Factor(
        50e-6, 40e-6, "s of the host per eager layer", "estimate",
        "four calls of torch's linear at some 7 us, and 2 us of the driver for each of nine launches",
    ),
    "graph between attentions": Factor(
        16e-6, 10e-6, "s of the host per layer", "estimate",
        "2.5 us for a straight line of kernels (NVIDIA, CUDA 12.6), torch's replay, and three launches at 2 us",
    ),
}  # fmt: skip


class Work(NamedTuple):
    """One step: decodes with a mean context, prompt tokens with the number of keys that they see."""

    decodes: int
    context: float
    prompt_tokens: int = 0
    prompt_keys: float = 0.0
    prompts: int = 0  # that end in this step


class Host(NamedTuple):
    step_s: float  # without launches of layers
    eager_layer_s: float
    attention_s: float  # of a layer whose other kernels are in graphs


class Step(NamedTuple):
    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return max(self)


class Model:
    """Step times of a decoder, with all factors at their slow or their fast end."""

    def __init__(
        self,
        shape: Shape,
        host: Host,
        end: str,
        *,
        fp8_cache: bool = False,
        fp8_weights: bool = False,
        device: Device | None = None,  # with other ceilings than `FACTORS` has
    ) -> None:
        self._shape = shape
        self._fp8_weights = fp8_weights
        self._attention = "decode attention, 8 bits" if fp8_cache else "decode attention"
        self._kv_bytes = 2 if fp8_cache else 4  # of a key and a value
        self._host = host
        self._at = {name: float(getattr(factor, end)) for name, factor in FACTORS.items()}
        if device is not None:
            self._at |= {"bandwidth": device.copy_bandwidth, "arithmetic": device.flops}

    def step(self, work: Work) -> Step:
        shape, at = self._shape, self._at
        tokens, samples = work.decodes + work.prompt_tokens, work.decodes + work.prompts
        layer_s = 0.0
        if work.prompt_tokens and tokens <= MOST_TOKENS:
            tokens = prompt_sizes(tokens)[-1]
            layer_s = self._host.attention_s + at["graph between attentions"]
        elif work.prompt_tokens:
            layer_s = self._host.eager_layer_s + at["driver and cuBLAS"]
        head = self._product(samples, shape.hidden, shape.vocab) + 2 * at["kernel boundary"]
        sampling = 2 * samples * shape.vocab / (at["sampling"] * at["bandwidth"])
        device = shape.layers * self._layer(work, tokens) + head + sampling + at["between steps"]
        return Step(device, self._host.step_s + shape.layers * layer_s)

    def _layer(self, work: Work, tokens: int) -> float:
        shape, at = self._shape, self._at
        queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        products = ((shape.hidden, queries + 2 * kv), (queries, shape.hidden), (shape.hidden, 2 * shape.intermediate),
                    (shape.intermediate, shape.hidden))  # fmt: skip
        # Two norms read two rows and write two; rotation reads and writes; SiLU reads two rows and writes one.
        moved = 2 * tokens * (2 * 4 * shape.hidden + 2 * (queries + 2 * kv) + 3 * shape.intermediate)
        roundings = 0.0
        if self._fp8_weights:  # of activations: two bytes read, one written
            roundings = 3 * tokens * sum(inputs for inputs, _ in products) / (at["small kernels"] * at["bandwidth"])
            roundings += len(products) * at["kernel boundary"]
        return (
            sum(self._product(tokens, *sizes, narrow=self._fp8_weights) for sizes in products)
            + roundings
            + moved / (at["small kernels"] * at["bandwidth"])
            + work.decodes * work.context * self._kv_bytes * kv / (at[self._attention] * at["bandwidth"])
            + -(-work.decodes * shape.kv_heads // RESIDENT_PROGRAMS) * at["start of a decode"]
            + 4 * queries * work.prompt_keys / at["prompt attention"]
            + KERNELS_PER_LAYER * at["kernel boundary"]
        )

    def _product(self, rows: int, inputs: int, outputs: int, *, narrow: bool = False) -> float:
        """Return the longer of streaming the operands and computing full waves of the best tile."""
        at, size = self._at, 1 if narrow else 2  # bytes of an operand
        streamed = (size * (inputs * outputs + rows * inputs) + 2 * rows * outputs) / at["bandwidth"]
        waves = min(m * n * -(-(-(-rows // m) * -(-outputs // n)) // NUM_MULTIPROCESSORS) for m, n in TILES)
        arithmetic = at["arithmetic"] * (at["products of 8 bits"] if narrow else 1.0)
        computed = 2 * inputs * waves * NUM_MULTIPROCESSORS / arithmetic
        return max(streamed, computed) / at["products"] + at["start of a product"]

    def workload_tokens_per_s(self, lengths: Sequence[tuple[int, int]]) -> float:
        seconds = sum(self.step(work).seconds for work in workload(lengths))
        return sum(num_output for _, num_output in lengths) / seconds


def workload(lengths: Sequence[tuple[int, int]]) -> Iterator[Work]:
    """Yield the steps of requests that all wait at the start: decodes first, prompts in chunks with what is left."""
    waiting = deque([0, *length] for length in lengths)  # computed, input, output
    running: list[list[int]] = []  # context, tokens to come
    while waiting or running:
        decodes, context = len(running), sum(row[0] for row in running) / max(len(running), 1)
        tokens, keys, ended = 0, 0.0, []
        while waiting and decodes + tokens < BUDGET and len(running) + len(ended) < MAX_NUM_SEQS:
            request = waiting[0]
            chunk = min(request[1] - request[0], BUDGET - decodes - tokens)
            tokens, keys = tokens + chunk, keys + chunk * (request[0] + chunk / 2)
            request[0] += chunk
            if request[0] == request[1]:
                waiting.popleft()
                ended.append([request[1] + 1, request[2] - 1])
        yield Work(decodes, context, tokens, keys, len(ended))
        running = [row for row in ([row[0] + 1, row[1] - 1] for row in running) if row[1] > 0]
        running += [row for row in ended if row[1] > 0]


def served(running: int) -> Work:
    """Return a step with a prompt of a steady load: as many tokens of prompts as keep so many requests running."""
    num_input, num_output = SERVED
    prompts = max(running / num_output, 1.0)
    tokens = round(prompts * num_input)
    return Work(running, num_input + num_output / 2, tokens, tokens * num_input / 2, round(prompts))


def random_lengths() -> list[tuple[int, int]]:
    count, (low, high) = WORKLOAD
    draw = random.Random(0)
    return [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]


def predict(name: str, host: Host) -> dict[str, Any]:
    shape, lengths = SHAPES[name], random_lengths()
    slow, fast = (Model(shape, host, end) for end in ("slow", "fast"))
    limit = sum(length[1] for length in lengths) / workload_seconds(shape, lengths, MAX_NUM_SEQS)
    batch = BATCHES[name]
    return {
        "tokens_per_s": [round(model.workload_tokens_per_s(lengths)) for model in (slow, fast)],
        "tokens_per_s_limit": round(limit),
        "eager_layer_host_us": round(1e6 * host.eager_layer_s, 1),
        "attention_host_us": round(1e6 * host.attention_s, 1),
        "step_host_us": round(1e6 * host.step_s, 1),
        "launches_per_step": KERNELS_PER_LAYER * shape.layers,
        "decode_step": {
            "batch": batch,
            "context": CONTEXT,
            "ms": [round(1e3 * model.step(Work(batch, CONTEXT)).seconds, 2) for model in (fast, slow)],
        },
        "served": [served_load(slow, fast, running) for running in RUNNING],
        "fp8_cache": in_8_bits(shape, host, lengths, batch, fp8_cache=True),
        "fp8_weights": in_8_bits(shape, host, lengths, batch, fp8_weights=True),
        "fp8_both": in_8_bits(shape, host, lengths, batch, fp8_cache=True, fp8_weights=True),
    }


def in_8_bits(
    shape: Shape, host: Host, lengths: Sequence[tuple[int, int]], batch: int, **settings: bool
) -> dict[str, Any]:
    """Predict the same with a KV cache or weights of 8 bits."""
    slow, fast = (Model(shape, host, end, **settings) for end in ("slow", "fast"))
    return {
        "tokens_per_s": [round(model.workload_tokens_per_s(lengths)) for model in (slow, fast)],
        "decode_step_ms": [round(1e3 * model.step(Work(batch, CONTEXT)).seconds, 2) for model in (fast, slow)],
    }


def served_load(slow: Model, fast: Model, running: int) -> dict[str, Any]:
    """Describe the steps with a prompt of a steady load, and what all steps lose to the launches of these."""
    steps = [model.step(served(running)) for model in (fast, slow)]
    return {
        "running": running,
        "device_ms": [round(1e3 * step.device_s, 2) for step in steps],
        "host_ms": [round(1e3 * step.host_s, 2) for step in steps],
        "host_bound": steps[1].host_s > steps[0].device_s,
        "lost_percent": [round(100 * lost(model, running), 1) for model in (slow, fast)],
    }


def lost(model: Model, running: int) -> float:
    """Return the share of time that a steady load loses because the host launches steps with prompts too slowly."""
    share = min(running / SERVED[1], 1.0)  # of steps that have a prompt
    eager, decode = model.step(served(running)), model.step(Work(running, served(running).context))
    others = (1.0 - share) * decode.seconds
    return 1.0 - (share * max(eager.device_s, decode.host_s) + others) / (share * eager.seconds + others)


def step_host_s(name: str) -> float:
    """Return the measured median of a decode step's host work, one step ahead."""
    runs = json.loads((RESULTS / "host_timeline.json").read_text())["models"][name]["runs"]
    return 1e-6 * statistics.median(run["host_us_total"] for run in runs if run["is_async"])


def measured_hosts() -> dict[str, Host]:
    """Measure each model's slowest kind of eager layer, and of attention."""
    from modelled.eager_layer import measure

    return {
        name: Host(
            step_host_s(name),
            1e-6 * max(time.host_us for time in times.values()),
            1e-6 * max(time.attention_us for time in times.values()),
        )
        for name, times in measure().items()
    }


def main() -> None:
    study = Study("step_model", __doc__, "torch", "triton")
    study.add_argument("--json", action="store_true")
    study.add_argument(
        "--host-us",
        type=float,
        nargs=2,
        metavar=("LAYER", "ATTENTION"),
        help="take these; measure none",
    )
    options = study.begin()
    if options.host_us is None:
        hosts = measured_hosts()
    else:
        hosts = {name: Host(step_host_s(name), *(1e-6 * us for us in options.host_us)) for name in BATCHES}
    predicted = {name: predict(name, hosts[name]) for name in BATCHES}
    result = {**predicted, "factors": {name: factor._asdict() for name, factor in FACTORS.items()}}
    study.save(result)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    show({"factor": name, **factor._asdict()} for name, factor in FACTORS.items())
    for name, values in predicted.items():
        print(f"\n{name}")
        for key, value in values.items():
            if isinstance(value, list) and isinstance(value[0], dict):
                print(key)
                show(value)
            else:
                print(f"{key}: {value}")


if __name__ == "__main__":
    main()
