"""Goodput with full weights, with a quantised copy of them under pressure, and with the copy alone, in turns.

    python benchmarks weight_pressure --shape qwen3-0.6b --threads 2 --save

One load of random weights runs all three. The load between is the middle of the measured capacities of full and
quantised weights; the other is a multiple of the first. Waiting requests are limited, so that a refusal takes
the place of a hopeless wait; a refused request misses its objective. Then the same prompts are answered one by one,
before and after a burst.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.clocks import WallClock
from common.engine_runs import FIRST_ID, GREEDY, Engine, EngineLoop, add_engine_options, random_engine, run_engine
from common.study import Study, in_turns, show, summary
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.request import Request
from tidewheel.scheduler.controllers import HOLD_S
from tidewheel.simulate.outcomes import throughput
from tidewheel.stats import Objective
from tidewheel.workload.arrivals import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace, synthesise

WAITING_SHARE = 0.8  # of the objective's first token, that a full waiting set takes with quantised weights
TPOT_FACTOR = 1.5  # of the measured time per token at the capacity of full weights
MODES = ("full", "pressure", "quantized")
Figures = dict[str, Any]


def trace_of(options: argparse.Namespace, rate: float | None, count: int, seed: int) -> Trace:
    """Return requests at `rate` a second; None: all at once."""
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(count) if rate is None else poisson_arrivals(count, rate, rng)
    prompt, output = (Lengths.parse(text, name=text) for text in (options.prompt, options.output))
    return synthesise(arrivals, prompt, output, rng)


def config_of(config: EngineConfig, mode: str) -> EngineConfig:
    if mode == "full":
        return dataclasses.replace(config, pressure_quantization="none")
    return config if mode == "pressure" else dataclasses.replace(config, pressure_latency_ms=0.01)


def capacity(engine: Engine, options: argparse.Namespace, mode: str) -> tuple[float, float]:
    """Return requests a second with all rows busy, and the median time per output token."""
    trace = trace_of(options, None, max(options.capacity_batches * options.rows, 10), seed=0)
    outcomes = run_engine(engine, trace, config_of(engine.config, mode)).outcomes
    return throughput(outcomes), float(np.nanmedian(outcomes.tpot))


def offered(engine: Engine, trace: Trace, mode: str, limit: int, objective: Objective) -> Figures:
    config = dataclasses.replace(config_of(engine.config, mode), max_waiting_requests=limit)
    run = run_engine(engine, trace, config)
    missed = run.outcomes.misses(objective)
    return {
        "missed": int(missed.sum()),
        "refused": int((~run.outcomes.finished).sum()),
        "goodput": float((~missed).sum() / run.outcomes.span),
        "ttft_p99_s": float(np.nanquantile(run.outcomes.ttft, 0.99)),
        "quantized_steps": run.stats.num_quantized_steps / run.stats.num_steps,
    }


def compared(engine: Engine, options: argparse.Namespace, rate: float, limit: int, objective: Objective) -> Figures:
    """Run all modes at `rate` in turns, on the same requests."""
    trace = trace_of(options, rate, options.requests, seed=1)
    runs = {mode: lambda mode=mode: offered(engine, trace, mode, limit, objective) for mode in MODES}
    results = in_turns(runs, options.repeats, warm_up=0)
    return {
        mode: {name: summary([one[name] for one in ones])["median"] for name in ones[0]}
        for mode, ones in results.items()
    }


def answers_around_a_burst(engine: Engine, options: argparse.Namespace) -> Figures:
    """Answer the same prompts one by one, before and after a burst, without a prefix cache."""
    config = dataclasses.replace(engine.config, enable_prefix_caching=False)
    clock, rng = WallClock(), np.random.default_rng(2)
    loop = EngineLoop(build_scheduler(config, engine.info), engine.runner, clock)
    prompts = [rng.integers(FIRST_ID, engine.info.vocab_size, 32, dtype=np.int32) for _ in range(4 * options.rows)]

    def ask(name: str, count: int, *, at_once: bool = False) -> Iterator[Request]:
        for index in range(count):
            request = Request(f"{name} {index}", prompts[index], GREEDY, max_tokens=16, arrival_time=clock())
            loop.send(request)
            if not at_once:
                loop.run()
            yield request

    before = list(ask("before", options.probes))
    burst = list(ask("burst", len(prompts), at_once=True))
    loop.run()
    clock.wait_until(clock() + HOLD_S)
    after = list(ask("after", options.probes))
    return {
        "equal": sum(a.output_token_ids == b.output_token_ids for a, b in zip(before, after, strict=True)),
        "of": len(before),
        "all_by_full_weights": {one.weights_used for one in (*before, *after)} == {"full"},
        "burst_not_by_full_weights": sum(one.weights_used != "full" for one in burst),
    }


def measure(engine: Engine, options: argparse.Namespace) -> Figures:
    runs = {mode: lambda mode=mode: capacity(engine, options, mode) for mode in ("full", "quantized")}
    capacities = {mode: np.median(ones, axis=0).tolist() for mode, ones in in_turns(runs, options.repeats).items()}
    (full, tpot_s), (quantized, _) = capacities["full"], capacities["quantized"]
    objective = Objective(options.ttft_s, TPOT_FACTOR * tpot_s)
    limit = max(round(WAITING_SHARE * options.ttft_s * quantized), 2)
    between = full + options.between * (quantized - full)
    loads = {"between": between, "overload": options.overload * full}
    figures = {name: compared(engine, options, rate, limit, objective) for name, rate in loads.items()}
    missed = {mode: figures["between"][mode]["missed"] for mode in MODES}
    goodput = {mode: figures["overload"][mode]["goodput"] for mode in MODES}
    return {
        "capacity_per_s": {"full": full, "quantized": quantized},
        "objective": {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s},
        "max_waiting_requests": limit,
        "loads_per_s": loads,
        **figures,
        "fewer_missed": 1.0 - missed["pressure"] / max(missed["full"], 1),
        "goodput_of_quantized": goodput["pressure"] / max(goodput["quantized"], 1e-9),
        "answers": answers_around_a_burst(engine, options),
        "weights_mib": engine.info.weights_bytes / (1 << 20),
        "copy_mib": engine.info.copy_bytes / (1 << 20),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    parser.add_argument("--copy", choices=["int8", "int4"], default="int8")
    parser.add_argument("--rows", type=int, default=8, help="requests that run at once (default: %(default)s)")
    parser.add_argument("--prompt", default="uniform:48", help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--output", default="uniform:48", help="lengths of outputs (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=120, help="of a load (default: %(default)s)")
    parser.add_argument(
        "--capacity-batches", type=int, default=3, help="that measure a capacity (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--ttft-s", type=float, default=2.0, help="objective (default: %(default)s)")
    parser.add_argument(
        "--between", type=float, default=0.5, help="place between the capacities (default: %(default)s)"
    )
    parser.add_argument(
        "--overload", type=float, default=3.0, help="of the full weights' capacity (default: %(default)s)"
    )


def main() -> None:
    study = Study("weight_pressure", __doc__, "torch")
    add_options(study)
    options = study.begin()
    settings = {"pressure_quantization": options.copy, "max_num_seqs": options.rows, "max_model_len": 512}
    with random_engine(options, settings) as engine:
        figures = measure(engine, options)
    for load in ("between", "overload"):
        show({"load": load, "weights": mode, **figures[load][mode]} for mode in MODES)
    print({name: figures[name] for name in ("fewer_missed", "goodput_of_quantized", "answers")})
    study.save({"options": {k: v for k, v in vars(options).items() if k != "save"}, **figures})


if __name__ == "__main__":
    main()
