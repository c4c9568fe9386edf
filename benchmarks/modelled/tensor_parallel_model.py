"""Predicted speed of decoding on 1 to 8 GPUs that share a model, and how the prediction fares on published figures.

    python benchmarks tensor_parallel_model --save
    python benchmarks tensor_parallel_model --save-cost cost.json --ranks 4

A rank's kernels take what `step_model` says of its part of the shape. Added are two all-reduces for a layer and one
for the embedding, the gather of candidates to sample from, and the broadcast of tokens. Ranks are never late. A step
takes the longer of device and host, which works one step ahead. Requests without room in the KV cache wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.study import Study, show
from modelled.roofline import SHAPES, kv_bytes_per_token, part_of, weights_bytes
from modelled.step_model import FACTORS, step_host_s
from modelled.tensor_parallel import (
    ENDS,
    MACHINES,
    NVLINK,
    PCIE,
    PUBLISHED_ALL_REDUCES,
    PUBLISHED_STEPS,
    TensorParallelModel,
)
from tidewheel.simulate.cost_model import CostModel

MODELS = ("llama-3.1-8b", "qwen3-8b")
RANKS, BATCHES, CONTEXTS = (1, 2, 4, 8), (1, 8, 32, 128, 256), (1024, 4096)
GOAL_RANKS, GOAL_BATCH, GOAL = 4, 128, 3.0  # times the tokens/s of one device
SERVED, FASTEST = ("NCCL",), tuple(NVLINK)  # ways of an all-reduce: today's, and those of which the fastest is taken
HOPPER = ("H100 SXM", "H200")
DECODE_FACTORS = (
    "decode attention", "products", "start of a product", "start of a decode", "small kernels", "kernel boundary",
    "sampling", "between steps",
)  # fmt: skip
PROMPTS = (512, 2048, 8192)  # tokens
SURPLUS_US = 32  # of a layer of SGLang in 2024, beside the model: `check_steps`
REQUESTS = (32, 128, 512, 1024)  # that `GOAL_RANKS` devices have in all
BLOCK_SIZE = 64
MOST_PROMPT_TOKENS = 8192  # of a step


def at_ends(
    name: str, machine: str, num_ranks: int, ways: tuple[str, ...], **settings: bool
) -> list[TensorParallelModel]:
    """Return the model with its factors at the slow and at the fast end."""
    host_s = step_host_s("llama-3.1-8b")
    shape = SHAPES[name]
    return [
        TensorParallelModel(shape, MACHINES[machine], num_ranks, end, ways=ways, host_s=host_s, **settings)
        for end in ENDS
    ]


def predict(name: str, machine: str, ways: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield what each number of ranks does with each batch; pairs are the slow and the fast end."""
    ranks = {num_ranks: at_ends(name, machine, num_ranks, ways) for num_ranks in RANKS}
    for context in CONTEXTS:
        for batch in BATCHES:
            one = [model.tokens_per_s(batch, context) for model in ranks[1]]
            for num_ranks, ends in ranks.items():
                speeds = [model.tokens_per_s(batch, context) for model in ends]
                running = ends[0].num_running(batch, context)
                yield {
                    "context": context,
                    "batch": batch,
                    "ranks": num_ranks,
                    "running": running,
                    "ms": [1e3 * running / speed for speed in speeds],
                    "tokens_per_s": [round(speed) for speed in speeds],
                    "times": [speed / alone for speed, alone in zip(speeds, one, strict=True)],
                    "all_reduce_us": [1e6 * model.all_reduce_seconds(running) for model in ends],
                }


def arrangements(name: str, machine: str) -> Iterator[dict[str, Any]]:
    """Yield tokens/s of `GOAL_RANKS` devices as replicas of one or more ranks; pairs are slow and fast ends."""
    for context in CONTEXTS:
        for requests in REQUESTS:
            row: dict[str, Any] = {"context": context, "requests": requests}
            for num_ranks in (1, 2, 4):
                replicas = GOAL_RANKS // num_ranks
                speeds = [
                    replicas * model.tokens_per_s(requests // replicas, context)
                    for model in at_ends(name, machine, num_ranks, SERVED)
                ]
                row[f"{replicas} x {num_ranks}"] = [round(speed) for speed in speeds]
            yield row


def prompts(name: str, machine: str) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of lone prompts on one device, and how many times as fast several are."""
    ranks = {num_ranks: at_ends(name, machine, num_ranks, SERVED) for num_ranks in RANKS}
    for num_tokens in PROMPTS:
        one, *others = ([model.prompt_seconds(num_tokens) for model in ends] for ends in ranks.values())
        times = {
            f"{num_ranks} ranks": [alone / several for alone, several in zip(one, seconds, strict=True)]
            for num_ranks, seconds in zip(RANKS[1:], others, strict=True)
        }
        yield {"tokens": num_tokens, "ms on 1": [1e3 * seconds for seconds in one], **times}


def goal(name: str, machine: str, ways: tuple[str, ...], context: int = CONTEXTS[0]) -> dict[str, list[float]]:
    """Say how far `GOAL_RANKS` are from the goal, and what would reach it; pairs are the slow and the fast end."""
    found: dict[str, list[float]] = {}
    whole = at_ends(name, machine, GOAL_RANKS, ways, gathers_candidates=False)
    for one, several, with_all in zip(
        at_ends(name, machine, 1, ways), at_ends(name, machine, GOAL_RANKS, ways), whole, strict=True
    ):
        alone_s = one.seconds(GOAL_BATCH, context)
        surplus_s = 1e-6 * SURPLUS_US * one.shape.layers
        quiet_s = several.seconds_without_all_reduces(GOAL_BATCH, context)
        contexts = (
            tokens for tokens in range(256, 65_536, 256)
            if one.seconds(GOAL_BATCH, tokens) >= GOAL * several.seconds(GOAL_BATCH, tokens)
        )  # fmt: skip
        figures = {
            "times": alone_s / several.seconds(GOAL_BATCH, context),
            "times if all logits are gathered": alone_s / with_all.seconds(GOAL_BATCH, context),
            f"times if layers took {SURPLUS_US} us longer": (alone_s + surplus_s)
            / (several.seconds(GOAL_BATCH, context) + surplus_s),
            "times if all-reduces took no time": alone_s / quiet_s,
            "us of an all-reduce": 1e6 * several.all_reduce_seconds(GOAL_BATCH),
            "us of an all-reduce for the goal": 1e6 * (alone_s / GOAL - quiet_s) / several.num_all_reduces,
            "context for the goal": next(contexts),
        }
        for what, figure in figures.items():
            found.setdefault(what, []).append(figure)
    return found


def check_all_reduces() -> Iterator[dict[str, Any]]:
    """Yield published all-reduces beside the model's, the mean of both ends."""
    for way, num_ranks, kib, published_us, source in PUBLISHED_ALL_REDUCES:
        model_us = statistics.mean(1e6 * NVLINK[way].seconds(1024 * kib, num_ranks, end) for end in ENDS)
        yield {
            "all-reduce": way,
            "ranks": num_ranks,
            "KiB": kib,
            "published us": published_us,
            "model us": round(model_us, 1),
            "error %": round(100 * (model_us / published_us - 1), 1),
            "source": source,
        }


def check_steps() -> Iterator[dict[str, Any]]:
    """Yield published steps beside the model's, the mean of both ends and what the engine's layers take longer."""
    for case in PUBLISHED_STEPS:
        surplus_us = None  # of a layer
        for shape, num_ranks, batch, published_ms in case.steps:
            ends = [TensorParallelModel(shape, case.machine, num_ranks, end, ways=(case.way,)) for end in ENDS]
            model_ms = statistics.mean(1e3 * model.seconds(batch, case.context) for model in ends)
            if surplus_us is None:
                surplus_us, error = 1e3 * (published_ms - model_ms) / shape.layers, None
            else:
                model_ms += 1e-3 * surplus_us * shape.layers
                error = round(100 * (model_ms / published_ms - 1), 1)
            yield {
                "engine": case.source,
                "layers": shape.layers,
                "ranks": num_ranks,
                "batch": batch,
                "published ms": round(published_ms, 2),
                "model ms": round(model_ms, 2),
                "surplus us": round(surplus_us, 1),
                "error %": error,
            }


def cost_model(name: str, machine: str, num_ranks: int) -> CostModel:
    """Return the mean of both ends as a cost for `tidewheel simulate`, in which the ranks are one device."""
    ends, shape, part = at_ends(name, machine, num_ranks, SERVED), SHAPES[name], part_of(SHAPES[name], num_ranks)

    def seconds(batch: int, context: int) -> float:
        return statistics.mean(model.seconds(batch, context) for model in ends)

    rows, context = BATCHES[-1], CONTEXTS[-1]
    row_s = (seconds(rows, 0) - seconds(1, 0)) / (rows - 1)
    kv_byte_s = (seconds(rows, context) - seconds(rows, 0)) / (rows * context * kv_bytes_per_token(part))
    products = FACTORS["products"]
    flops = MACHINES[machine].device.flops * statistics.mean((products.slow, products.fast))
    message_s = statistics.mean(model.all_reduce_seconds(MOST_PROMPT_TOKENS) for model in ends) / MOST_PROMPT_TOKENS
    prompt_token_s = 2 * part.num_layer_weights / flops + 2 * shape.layers * message_s
    return CostModel(
        name=f"{name}-{num_ranks}-ranks",
        device=f"{num_ranks} of {machine} (predicted)",
        weights_bytes=weights_bytes(part),
        kv_bytes_per_token=kv_bytes_per_token(part),
        block_size=BLOCK_SIZE,
        num_blocks=ends[0].max_kv_tokens // BLOCK_SIZE,
        overhead_s=seconds(1, 0) - row_s,
        knots=(rows,),
        seconds_per_token=(row_s, prompt_token_s),
        seconds_per_kv_byte=kv_byte_s,
    )


def span(ends: Sequence[float]) -> str:
    """Return the ends as text, the lesser first."""
    low, high = (f"{end:.3g}" if end < 1000 else f"{end:,.0f}" for end in sorted(ends))
    return low if low == high else f"{low} to {high}"


def spans(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, object]]:
    for row in rows:
        yield {what: span(value) if isinstance(value, list) else value for what, value in row.items()}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """Yield a line for each batch: tokens/s of one device, and how many times as many several reach."""
    for begin in range(0, len(rows), len(RANKS)):
        one, *others = rows[begin : begin + len(RANKS)]
        times = {f"{row['ranks']} ranks": span(row["times"]) for row in others}
        yield {
            "context": one["context"],
            "batch": one["batch"],
            "running on 1": one["running"],
            "tokens/s on 1": span(one["tokens_per_s"]),
            **times,
        }


def assumptions() -> dict[str, list[dict[str, object]]]:
    """Return what the model takes for granted, with sources."""
    return {
        "kernels": [{"factor": name, **FACTORS[name]._asdict()} for name in DECODE_FACTORS],
        "devices": [
            {
                "machine": name,
                "memory TB/s": machine.device.copy_bandwidth / 1e12,
                "TFLOP/s": machine.device.flops / 1e12,
                "GB": machine.memory_bytes / 1e9,
                "source": machine.source,
            }
            for name, machine in MACHINES.items()
        ],
        "all-reduces": [
            {
                "all-reduce": name,
                **{f"start us, {ranks} ranks": span(ends) for ranks, ends in way.start_us.items()},
                "link GB/s": span([speed / 1e9 for speed in way.bytes_per_s]),
                "source": way.source,
            }
            for name, way in ({f"{name}, PCIe": way for name, way in PCIE.items()} | NVLINK).items()
        ],
    }


def main() -> None:
    study = Study("tensor_parallel_model", __doc__)
    study.add_argument("--save-cost", type=Path, metavar="FILE", help="for `tidewheel simulate --cost`, and no more")
    study.add_argument("--model", choices=MODELS, default=MODELS[0], help="of the cost (default: %(default)s)")
    study.add_argument("--machine", choices=MACHINES, default="H100 SXM", help="of the cost (default: %(default)s)")
    study.add_argument(
        "--ranks", type=int, choices=RANKS, default=GOAL_RANKS, help="of the cost (default: %(default)s)"
    )
    options = study.begin()
    if options.save_cost is not None:
        cost_model(options.model, options.machine, options.ranks).save(options.save_cost)
        return
    result = {
        "assumptions": assumptions(),
        "published_all_reduces": list(check_all_reduces()),
        "published_steps": list(check_steps()),
        "predicted": {
            name: {machine: list(predict(name, machine, SERVED)) for machine in MACHINES} for name in MODELS
        },
        "predicted_fastest": {
            name: {machine: list(predict(name, machine, FASTEST)) for machine in HOPPER} for name in MODELS
        },
        "prompts": {name: {machine: list(prompts(name, machine)) for machine in MACHINES} for name in MODELS},
        "arrangements": {
            name: {machine: list(arrangements(name, machine)) for machine in MACHINES} for name in MODELS
        },
        "goal": {
            name: {
                machine: {" or ".join(ways): goal(name, machine, ways) for ways in (SERVED, FASTEST)}
                for machine in HOPPER
            }
            for name in MODELS
        },
    }
    study.save(result)
    report(result)


def report(result: dict[str, Any]) -> None:
    for name, rows in result["assumptions"].items():
        print(f"\n{name}")
        show(rows)
    for name in ("published_all_reduces", "published_steps"):
        print(f"\n{name.replace('_', ' ')}")
        show(result[name])
    for name, machines in result["predicted"].items():
        for machine, rows in machines.items():
            print(f"\n{name}, {machine}: tokens/s, and times as many")
            show(table(rows))
            print(f"\n{name}, {machine}: a prompt, and how many times as fast")
            show(spans(result["prompts"][name][machine]))
            print(f"\n{name}, {machine}: tokens/s of {GOAL_RANKS} devices as replicas x ranks")
            show(spans(result["arrangements"][name][machine]))
    print(f"\n{GOAL_RANKS} ranks, batch {GOAL_BATCH}, context {CONTEXTS[0]}; goal: {GOAL:g} times one device")
    show(
        {
            "model": name,
            "machine": machine,
            "all-reduces": ways,
            **{what: span(ends) for what, ends in figures.items()},
        }
        for name, machines in result["goal"].items()
        for machine, by_ways in machines.items()
        for ways, figures in by_ways.items()
    )


if __name__ == "__main__":
    main()
