"""Simulations from the options of `tidewheel simulate`, one per policy and load."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidewheel.cli.usage import UsageError
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, check_record_folder
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.fleet.router import make_router
from tidewheel.request import Priority
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.cost_model import BUILT_IN, CostModel
from tidewheel.simulate.lengths import Lengths
from tidewheel.simulate.report import Report, summarise
from tidewheel.simulate.simulated_engine import simulated_info
from tidewheel.simulate.simulator import ReplicaSettings, Simulator
from tidewheel.simulate.trace_files import read_trace
from tidewheel.simulate.traces import (
    FloatArray,
    Prefixes,
    Tenants,
    Trace,
    bursty_arrivals,
    poisson_arrivals,
    switching_arrivals,
    synthesise,
)

ARRIVALS = {"poisson": poisson_arrivals, "bursty": bursty_arrivals, "switching": switching_arrivals}
DEFAULT_LOAD = 0.8
MAX_LOAD = 10.0
CAPACITY_BATCHES = 8  # full batches to measure the capacity
UNBOUNDED = 1 << 30
MODEL = "simulated"


class Result(NamedTuple):
    policy: str
    load: float | None  # share of capacity; None: rate of option or file
    report: Report


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    trace_kind: str  # key of `ARRIVALS`, or a file's path
    recorded_trace: Trace | None
    num_requests: int
    rate: float | None
    loads: tuple[float, ...]
    prompt: Lengths
    output: Lengths
    max_tokens: int | None
    tenants: Tenants
    prefixes: Prefixes | None
    seed: int
    policies: tuple[str, ...]
    num_replicas: int
    router: str
    cost: CostModel
    settings: dict[str, str]
    record: str

    @classmethod
    def from_options(cls, args: argparse.Namespace) -> Plan:
        """Raise `UsageError` or `ConfigError` naming option and value."""
        from tidewheel.server.repository import parse_settings

        recorded_trace = None if args.trace in ARRIVALS else _read(args.trace)
        loads = args.load or ("" if recorded_trace is not None or args.rate is not None else str(DEFAULT_LOAD))
        plan = cls(
            trace_kind=args.trace,
            recorded_trace=recorded_trace,
            num_requests=_at_least_one("--requests", args.requests),
            rate=None if args.rate is None else _positive("--rate", args.rate),
            loads=tuple(_load(text) for text in loads.split(",") if text),
            prompt=Lengths.parse(args.prompt, name="--prompt"),
            output=Lengths.parse(args.output, name="--output"),
            max_tokens=None if args.max_tokens is None else _at_least_one("--max-tokens", args.max_tokens),
            tenants=_tenants(args.tenants),
            prefixes=_prefixes(args.prefixes),
            seed=_seed(args.seed),
            policies=tuple(dict.fromkeys(args.policy.split(","))),
            num_replicas=_at_least_one("--replicas", args.replicas),
            router=args.router,
            cost=_cost(args.cost),
            settings=parse_settings(args.set),
            record="" if args.record is None else str(args.record),
        )
        make_router(plan.router, plan.num_replicas)
        for policy in plan.policies:
            check_record_folder(plan.config(policy))
        return plan

    def config(self, policy: str) -> EngineConfig:
        if "scheduling_policy" in self.settings:
            raise UsageError("--set scheduling_policy: use --policy")
        values = {"model": MODEL, **self.settings, "scheduling_policy": policy, "record": self.record}
        return EngineConfig.from_settings(values)

    def trace(self, rate: float | None) -> Trace:
        """Return the trace at `rate`; None: the file's own rate."""
        if self.recorded_trace is not None:
            trace = self.recorded_trace
            if rate is None:
                return trace
            if not trace.rate:
                raise UsageError("the trace has one moment only: --rate and --load need a trace that has a rate")
            return trace.scaled(rate / trace.rate)
        assert rate is not None
        rng = np.random.default_rng(self.seed)
        return self._synthesise(self.num_requests, ARRIVALS[self.trace_kind](self.num_requests, rate, rng), rng)

    def _synthesise(self, count: int, arrivals: FloatArray, rng: np.random.Generator) -> Trace:
        return synthesise(
            count, arrivals, self.prompt, self.output, rng, tenants=self.tenants, prefixes=self.prefixes
        )

    def saturating(self, count: int) -> Trace:
        """Return `count` requests that arrive at once."""
        if self.recorded_trace is None:
            return self._synthesise(count, np.zeros(count), np.random.default_rng(self.seed))
        trace = self.recorded_trace
        index = np.arange(count) % len(trace)
        columns = {
            name: value[index]
            for name in trace.__dataclass_fields__
            if isinstance(value := getattr(trace, name), np.ndarray)
        }
        immediately = {"arrivals": np.zeros(count), "deadlines": np.full(count, np.inf)}
        return dataclasses.replace(trace, **(columns | immediately))


def simulate_all(plan: Plan) -> Iterator[Result]:
    for policy in plan.policies:
        if not plan.loads:
            yield Result(policy, None, simulate(plan, policy, plan.trace(plan.rate)))
            continue
        capacity = find_capacity(plan, policy) * plan.num_replicas
        for load in plan.loads:
            yield Result(policy, load, simulate(plan, policy, plan.trace(load * capacity)))


def simulate(plan: Plan, policy: str, trace: Trace) -> Report:
    simulator = build_simulator(plan, policy, trace)
    return summarise(simulator.run(), simulator.replicas)


def build_simulator(plan: Plan, policy: str, trace: Trace) -> Simulator:
    return _simulator(plan, plan.config(policy), trace, plan.num_replicas)


def find_capacity(plan: Plan, policy: str) -> float:
    """Return requests per second of one replica while its batch stays full."""
    config = plan.config(policy)
    unbounded = dataclasses.replace(
        config, record="", max_waiting_requests=UNBOUNDED, max_waiting_tokens=UNBOUNDED, scheduling_policy="fifo"
    )
    count = CAPACITY_BATCHES * config.max_num_seqs
    outcomes = _simulator(plan, unbounded, plan.saturating(count), 1).run()
    ends = np.sort(outcomes.last_token[outcomes.finished])
    first, last = len(ends) // 5, len(ends) * 7 // 10
    if len(ends) < 10 or ends[last] <= ends[first]:
        raise ConfigError(f"only {len(ends)} of {count} requests can run: see max_model_len and num_blocks")
    return float((last - first) / (ends[last] - ends[first]))


def _simulator(plan: Plan, config: EngineConfig, trace: Trace, num_replicas: int) -> Simulator:
    info = simulated_info(config, plan.cost, max_model_len=max(trace.max_num_tokens, 2))

    def make_scheduler(_number: int) -> Scheduler:
        return build_scheduler(config, info)

    return Simulator(
        trace,
        make_scheduler,
        plan.cost,
        _replica_settings(config, info),
        num_replicas=num_replicas,
        router=make_router(plan.router, num_replicas),
        max_tokens=plan.max_tokens,
    )


def _replica_settings(config: EngineConfig, info: EngineInfo) -> ReplicaSettings:
    return ReplicaSettings(
        num_rows=info.max_num_seqs,
        max_model_len=info.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        session_ttl_s=config.session_ttl_s,
    )


def _read(text: str) -> Trace:
    path = Path(text)
    if path.suffix not in (".jsonl", ".csv"):
        raise UsageError(f"--trace is {text!r}: choose one of {', '.join(ARRIVALS)}, or a .jsonl or .csv file")
    return read_trace(path)


def _cost(text: str) -> CostModel:
    if text in BUILT_IN:
        return BUILT_IN[text]
    if not Path(text).is_file():
        raise UsageError(f"--cost is {text!r}: no such file, and none of {', '.join(BUILT_IN)}")
    return CostModel.load(Path(text))


def _tenants(text: str | None) -> Tenants:
    if text is None:
        return Tenants()
    names, shares, priorities = [], [], []
    for entry in text.split(","):
        try:
            name, share, *priority = entry.split(":")
            names.append(name)
            shares.append(_positive("--tenants", float(share)))
            priorities.append(Priority.from_wire(int(priority[0]) if priority else 0))
        except (ValueError, IndexError):
            raise UsageError(
                f"--tenants has {entry!r}: write NAME:SHARE or NAME:SHARE:CLASS, say acme:10:3"
            ) from None
    if len(set(names)) != len(names):
        raise UsageError("--tenants names one of them twice")
    return Tenants(tuple(names), tuple(shares), tuple(priorities))


def _prefixes(text: str | None) -> Prefixes | None:
    if text is None:
        return None
    try:
        groups, tokens = (int(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(f"--prefixes is {text!r}: write N:TOKENS, say 8:512") from None
    return Prefixes(_at_least_one("--prefixes", groups), _at_least_one("--prefixes", tokens))


def _load(text: str) -> float:
    try:
        load = float(text)
    except ValueError:
        load = float("nan")
    if not 0 < load <= MAX_LOAD:
        raise UsageError(f"--load has {text!r}: it must be above 0 and at most {MAX_LOAD:g}, a share of the capacity")
    return load


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{name} is {value}: it must be at least 1")
    return value


def _positive(name: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{name} is {value:g}: it must be above 0")
    return value


def _seed(value: int) -> int:
    if value < 0:
        raise UsageError(f"--seed is {value}: it must be at least 0")
    return value
