"""Agents whose tools run, on a cache for a quarter of them, by expected pauses and by last use.

    python benchmarks agent_pauses --engine --cpu-clock --save

64 agents of 11 turns, with growth and pauses of a published trace (`tidewheel.workload.agents`), simulated and on
this CPU. *Recomputed* is the share of the tokens of earlier turns that later ones compute again. An agent alone has
the whole machine.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from common.clocks import Clock, CpuClock, WallClock
from common.engine_runs import (
    FIRST_ID,
    GREEDY,
    STOP_ID,
    EndingRunner,
    Engine,
    EngineLoop,
    add_engine_options,
    random_engine,
)
from common.study import Study, show
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.request import Request
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.stats import EngineStats
from tidewheel.workload.agents import AgentLoad, agents_trace
from tidewheel.workload.arrivals import FloatArray
from tidewheel.workload.traces import Trace

RECOMPUTED, TTFT_RATIO = 0.05, 2.0  # goals
NUM_ALONE = 16  # agents that run alone on the CPU


class Run(NamedTuple):
    outcomes: SimulationOutcomes
    stats: EngineStats


def reusable_tokens(trace: Trace) -> FloatArray:
    """Return by request the tokens whose keys and values the session's turn before has computed."""
    tokens = np.zeros(len(trace))
    for before, after in trace.next_turns().items():
        tokens[after] = trace.prompt_tokens[before] + trace.output_tokens[before] - 1
    return tokens


def mean_context(trace: Trace) -> float:
    last = [index for index in range(len(trace)) if index not in trace.next_turns()]
    return float((trace.prompt_tokens + trace.output_tokens)[last].mean())


def lone_agents(trace: Trace, count: int) -> Iterator[Trace]:
    """Yield the trace of each of the first agents, without pauses."""
    for agent in range(count):
        own = np.flatnonzero(trace.sessions == agent)
        values = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
        columns = {name: value[own] for name, value in values.items() if isinstance(value, np.ndarray)}
        columns["pauses"] = np.where(np.isnan(columns["pauses"]), np.nan, 0.0)
        yield dataclasses.replace(trace, **columns)


def figures(run: Run) -> dict[str, Any]:
    outcomes, reusable = run.outcomes, reusable_tokens(run.outcomes.trace)
    recomputed = np.maximum(reusable - outcomes.cached_tokens, 0.0)
    ttft = outcomes.ttft[reusable > 0]
    return {
        "finished": int(outcomes.finished.sum()),
        "recomputed": float(recomputed.sum() / reusable.sum()),
        "recomputed_of_prompts": float(recomputed.sum() / outcomes.trace.prompt_tokens.sum()),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "swapped_in": run.stats.num_swapped_in,
        "swapped_out": run.stats.num_swapped_out,
        "span_s": outcomes.span,
    }


def lone_p99(runs: list[Run]) -> float:
    later = [run.outcomes.ttft[reusable_tokens(run.outcomes.trace) > 0] for run in runs]
    return float(np.quantile(np.concatenate(later), 0.99))


def simulated(trace: Trace, settings: Mapping[str, object]) -> Run:
    config = EngineConfig.from_settings({"model": "simulated", "block_size": 64, **settings})
    info = simulated_info(config, H200_8B, max_model_len=trace.max_num_tokens)
    simulator = simulator_of(config, info, trace, H200_8B)
    outcomes = simulator.run()
    return Run(outcomes, simulator.replicas[0].scheduler.stats())  # type: ignore[union-attr]


class AgentLoop:
    """Agents on the engine's core: each turn's prompt is the one before, its answer, and the tool's result."""

    def __init__(self, engine: Engine, trace: Trace, config: EngineConfig) -> None:
        self._trace = trace
        self._next_turns = trace.next_turns()
        self._most = int(trace.output_tokens.max())
        self._rng = np.random.default_rng(0)
        self._vocab = engine.info.vocab_size
        self.outcomes = SimulationOutcomes(trace)
        self.scheduler = build_scheduler(config, engine.info)
        clock: Clock = CpuClock() if engine.cpu_clock else WallClock()
        self.loop = EngineLoop(self.scheduler, EndingRunner(engine.runner, trace), clock, self._ended)
        self._began = clock() - float(trace.arrivals[0])

    def run(self) -> Run:
        for index in np.flatnonzero(np.isnan(self._trace.pauses)).tolist():
            self._send(index, [], self._began + float(self._trace.arrivals[index]))
        self.loop.run()
        self.outcomes.check_complete()
        return Run(self.outcomes, self.loop.core.stats())

    def _send(self, index: int, said: list[int], at: float) -> None:
        trace = self._trace
        count = int(trace.prompt_tokens[index]) - len(said)
        prompt = np.array([*said, *self._rng.integers(FIRST_ID, self._vocab, count)], dtype=np.int32)
        self.outcomes.arrivals[index] = at - self._began
        request = Request(
            str(index), prompt, GREEDY, max_tokens=self._most, arrival_time=at, stop_token_ids=(STOP_ID,),
            session_id=trace.session(index), session_ttl=3600.0,
        )  # fmt: skip
        self.loop.send(request)

    def _ended(self, request: Request) -> None:
        index, ended = int(request.request_id), request.last_token_time
        assert ended is not None
        for name in ("first_scheduled_time", "first_token_time", "last_token_time"):
            setattr(request, name, getattr(request, name) - self._began)
        self.outcomes.record(index, 0, request)
        if tool := self._trace.tool(index):
            self.scheduler.pause_session(request.tenant, request.session_id, (tool,), ended)
        after = self._next_turns.get(index)
        if after is not None:
            said = [*request.prompt_token_ids.tolist(), *request.output_token_ids]
            self._send(after, said, ended + float(self._trace.pauses[after]))


def without_tools(trace: Trace) -> Trace:
    return dataclasses.replace(trace, tools=np.zeros_like(trace.tools))


def show_runs(place: str, alone_s: float, runs: Mapping[str, dict[str, Any]]) -> None:
    print(f"{place}: p99 of later turns' TTFT of an agent alone {alone_s * 1e3:.1f} ms", flush=True)
    show(
        {
            "host": host,
            "recomputed": f"{run['recomputed']:.2%} (goal {RECOMPUTED:.0%})",
            "p99 TTFT": f"{run['ttft_p99_s'] * 1e3:.1f} ms",
            "of one alone": f"{run['ttft_p99_s'] / alone_s:.2f} (goal {TTFT_RATIO:g})",
            "swapped in, out": f"{run['swapped_in']}, {run['swapped_out']}",
        }
        for host, run in runs.items()
    )


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    trace = agents_trace(AgentLoad(options.agents, options.turns, options.scale, seed=options.seed))
    context = mean_context(trace)
    settings = {"max_num_seqs": 64, "num_blocks": round(options.pool * context / 64)}
    alone_s = lone_p99([simulated(one, settings) for one in lone_agents(trace, options.agents)])
    runs: dict[str, dict[str, Any]] = {}
    for host in options.host:
        space = host * context * H200_8B.kv_bytes_per_token / 2**30
        for policy, offered in (("last use", without_tools(trace)), ("expected", trace)):
            runs[f"{host} contexts, {policy}"] = figures(simulated(offered, {**settings, "swap_space": space}))
    show_runs("simulated 8B on an H200", alone_s, runs)
    return {"alone_ttft_p99_s": alone_s, "runs": runs, "mean_context": context}


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    load = AgentLoad(options.agents, options.turns, options.cpu_scale, options.cpu_time, 60.0, 1000, options.seed)
    trace = agents_trace(load)
    context = mean_context(trace)
    settings: dict[str, object] = {
        "dtype": "float32", "block_size": 16, "max_model_len": 1024, "max_num_seqs": 64,
        "num_blocks": round(options.pool * context / 16), "swap_space": 1.0,
    }  # fmt: skip
    with random_engine(options, settings) as engine:
        per_context = context / engine.info.block_size
        alone = [AgentLoop(engine, one, engine.config).run() for one in lone_agents(trace, NUM_ALONE + 1)][1:]
        runs: dict[str, dict[str, Any]] = {}
        for host in options.host:
            limited = engine._replace(info=_with_host(engine, round(host * per_context)))
            for policy, offered in (("last use", without_tools(trace)), ("expected", trace)):
                runs[f"{host} contexts, {policy}"] = figures(AgentLoop(limited, offered, engine.config).run())
    alone_s = lone_p99(alone)
    show_runs(f"{options.shape} on this CPU", alone_s, runs)
    return {"alone_ttft_p99_s": alone_s, "runs": runs, "mean_context": context}


def _with_host(engine: Engine, num_host_blocks: int) -> Any:
    import msgspec

    return msgspec.structs.replace(engine.info, num_host_blocks=min(num_host_blocks, engine.info.num_host_blocks))


def main() -> None:
    study = Study("agent_pauses", __doc__, "torch", "numpy")
    study.add_argument("--agents", type=int, default=64)
    study.add_argument("--turns", type=int, default=11)
    study.add_argument("--pool", type=int, default=16, help="mean last contexts that the KV cache holds")
    study.add_argument("--host", type=int, nargs="+", default=[0, 8, 16, 32, 48], help="those of the host tier")
    study.add_argument("--scale", type=float, default=0.25, help="of the published lengths, in the simulator")
    study.add_argument("--engine", action="store_true", help="run the engine on this CPU too")
    study.add_argument("--cpu-scale", type=float, default=1 / 64, help="of the published lengths, on the CPU")
    study.add_argument("--cpu-time", type=float, default=1.0, help="of the published pauses, on the CPU")
    study.add_argument("--seed", type=int, default=0)
    add_engine_options(study)
    options = study.begin()
    result = {"simulator": simulate(options)}
    if options.engine:
        result["engine"] = on_cpu(options)
    study.save({"options": {name: getattr(options, name) for name in ("agents", "turns", "pool", "scale")}, **result})


if __name__ == "__main__":
    main()
