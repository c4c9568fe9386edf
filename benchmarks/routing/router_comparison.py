"""Routers on the same traces, in the simulator, with the published defaults of others: `peer_routers.py` names them.

    python benchmarks router_comparison --save

Eight replicas of an 8B model on an H200, by its data sheet, step by step with the real scheduler and cache. Traces:
sessions of six turns on average, single requests with one of 64 system prompts by Zipf's law, both mixed with 5 %
CRITICAL requests, and that with a replica that joins or leaves every 30 s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from common.study import Study, show
from routing.changing_fleet import Change, ChangingFleet, open_requests, presence
from routing.peer_routers import CacheAware, LeastBlocks, PowerOfTwo, PrefixCacheAffinity
from routing.session_traces import KINDS, make_trace
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.fleet.router import Router
from tidewheel.fleet.routers import ROUTERS
from tidewheel.request import Priority
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.scenario import UNBOUNDED, simulated_info
from tidewheel.workload.traces import NOBODY, Trace

PEERS: dict[str, Callable[[], Router[int]]] = {
    "power of two": PowerOfTwo,
    "SGLang cache_aware": CacheAware,
    "Dynamo KV": LeastBlocks,
    "Ray prefix affinity": PrefixCacheAffinity,
}
COMPARED: dict[str, Callable[[], Router[int]]] = {
    "round-robin": ROUTERS["round-robin"],
    **PEERS,
    "session-affinity": ROUTERS["session-affinity"],
    "prefix-aware": ROUTERS["prefix-aware"],
}
TRACES = (*KINDS, "churn")
TTFT_S, TPOT_S = 0.5, 0.04  # promised
WARM_UP_S = 30.0
WINDOW_S = 10.0
CHURN_S = 30.0


def changes(seconds: float) -> list[Change]:
    """Return leaves and joins in turn."""
    times = np.arange(WARM_UP_S, seconds, CHURN_S)
    return [Change(float(time), joins=bool(number % 2)) for number, time in enumerate(times)]


def make_fleet(router: Router[int], trace: Trace, num_replicas: int, changes: Sequence[Change]) -> ChangingFleet:
    config = EngineConfig.from_settings({"model": "simulated", "max_waiting_requests": str(UNBOUNDED),
                                         "max_waiting_tokens": str(UNBOUNDED)})  # fmt: skip
    info = simulated_info(config, H200_8B, max_model_len=trace.max_num_tokens)
    return ChangingFleet(
        trace,
        router,
        changes,
        make_scheduler=lambda _: build_scheduler(config, info),
        cost=H200_8B,
        num_rows=info.max_num_seqs,
        max_model_len=info.max_model_len,
        session_ttl_s=0.0,
        num_replicas=num_replicas,
    )


def figures(fleet: ChangingFleet, outcomes: SimulationOutcomes, seconds: float) -> dict[str, Any]:
    trace = outcomes.trace
    counted = (trace.arrivals >= WARM_UP_S) & outcomes.finished
    ttft, tpot = outcomes.ttft[counted], np.nan_to_num(outcomes.tpot[counted])
    critical = outcomes.ttft[counted & (trace.priorities == Priority.CRITICAL)]
    edges = np.arange(WARM_UP_S, seconds + 0.1, WINDOW_S)
    loads = np.where(presence(fleet, edges), open_requests(fleet, outcomes, edges), np.nan)
    ratio = np.nanmax(loads, axis=0) / np.nanmean(loads, axis=0)
    loads = loads[~np.isnan(loads).all(axis=1)]
    whole = np.nanmean(loads, axis=1)
    return {
        "requests": int(counted.sum()),
        "ttft_mean_ms": 1e3 * float(ttft.mean()),
        "ttft_p50_ms": 1e3 * float(np.quantile(ttft, 0.5)),
        "ttft_p99_ms": 1e3 * float(np.quantile(ttft, 0.99)),
        "tpot_p99_ms": 1e3 * float(np.quantile(tpot, 0.99)),
        "critical_ttft_p99_ms": 1e3 * float(np.quantile(critical, 0.99)) if len(critical) else None,
        "missed": float(((ttft > TTFT_S) | (tpot > TPOT_S)).mean()),
        "cached": float(outcomes.cached_tokens[counted].sum() / trace.prompt_tokens[counted].sum()),
        "max_over_mean": float(np.nanmax(whole) / np.nanmean(whole)),
        "max_over_mean_10s": float(np.median(ratio)),
        **turns(fleet, outcomes, counted),
        "mean_open": float(np.nanmean(loads)),
    }


def turns(fleet: ChangingFleet, outcomes: SimulationOutcomes, counted: np.ndarray) -> dict[str, float | None]:
    """Return shares of turns after the first.

    At home: where the turn before went, which may have left. Cache lost: no replica has a block of the session's own
    text, so no router could have found it. At cache: of the others, where the most of the prompt was cached.
    """
    trace = outcomes.trace
    order = np.argsort(trace.sessions, kind="stable")
    order = order[trace.sessions[order] != NOBODY]
    before, turn = order[:-1], order[1:]
    later = (trace.sessions[turn] == trace.sessions[before]) & counted[turn]
    before, turn = before[later], turn[later]
    if not len(turn):
        return {"turns_at_home": None, "turns_cache_lost": None, "turns_at_cache": None}
    is_cached = fleet.most_cached[turn] > trace.prefix_tokens[turn]
    at_cache = fleet.cached_where_sent[turn] == fleet.most_cached[turn]
    return {
        "turns_at_home": float((outcomes.replicas[turn] == outcomes.replicas[before]).mean()),
        "turns_cache_lost": float((~is_cached).mean()),
        "turns_at_cache": float(at_cache[is_cached].mean()),
    }


def run(case: tuple[str, str, int], options: argparse.Namespace) -> dict[str, Any]:
    kind, name, seed = case
    trace = make_trace(KINDS["mixed" if kind == "churn" else kind], options.rate, options.seconds, seed)
    fleet = make_fleet(COMPARED[name](), trace, options.replicas, changes(options.seconds) if kind == "churn" else [])
    result = {"trace": kind, "router": name, "seed": seed, **figures(fleet, fleet.run(), options.seconds)}
    show([{key: value for key, value in result.items() if value is not None}])
    return result


def means(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure over the seeds."""
    first = results[0]
    keys = [key for key in first if key not in ("trace", "router", "seed")]
    return {
        "trace": first["trace"],
        "router": first["router"],
        **{key: None if first[key] is None else float(np.mean([one[key] for one in results])) for key in keys},
    }


def main() -> None:
    study = Study("router_comparison", __doc__, "numpy")
    study.add_argument("--replicas", type=int, default=8)
    study.add_argument("--rate", type=float, default=110.0, help="requests/s of all (default: %(default)g)")
    study.add_argument("--seconds", type=float, default=90.0, help="simulated (default: %(default)g)")
    study.add_argument("--seeds", type=int, nargs="+", default=[1], help="one trace each; means are shown")
    study.add_argument("--traces", nargs="+", default=TRACES, choices=TRACES)
    study.add_argument("--routers", nargs="+", default=list(COMPARED), choices=list(COMPARED))
    study.add_argument("--processes", type=int, default=1)
    options = study.begin()
    pairs = list(itertools.product(options.traces, options.routers))
    cases = [(*pair, seed) for pair in pairs for seed in options.seeds]
    with ProcessPoolExecutor(options.processes) as pool:
        runs = list(pool.map(functools.partial(run, options=options), cases))
    count = len(options.seeds)
    results = [means(runs[start : start + count]) for start in range(0, len(runs), count)]
    show(results)
    promised = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
    study.save({"options": vars(options), "promised": promised, "means": results})


if __name__ == "__main__":
    main()
