"""Factories for simulator tests: a short trace, a small engine, a plain cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.coarse_replica import CoarseLimits
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.fleet import ScalingPlan
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.simulator import Simulator
from tidewheel.workload.arrivals import poisson_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace, synthesise

COST = CostModel(name="plain", overhead_s=0.010, seconds_per_token=(1e-4,), turn_overhead_s=1e-3)


def lengths(text: str) -> Lengths:
    return Lengths.parse(text, name="lengths")


def make_trace(
    count: int = 60,
    rate: float = 20.0,
    *,
    prompt: str = "uniform:12",
    output: str = "uniform:6",
    seed: int = 0,
    **extra: Any,
) -> Trace:
    rng = np.random.default_rng(seed)
    return synthesise(poisson_arrivals(count, rate, rng), lengths(prompt), lengths(output), rng, **extra)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    **changes: Any,
) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 512,
        "max_waiting_requests": 1000,
        "max_waiting_tokens": 1 << 20,
        "watermark": 0.0,
    }
    kv = KVCacheManager(
        num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, num_host_blocks=num_host_blocks
    )
    return Scheduler(SchedulerConfig(**(settings | changes)), kv)


def simulator(
    trace: Trace,
    *,
    num_replicas: int = 1,
    router: str = "round-robin",
    cost: CostModel = COST,
    max_inflight_steps: int = 1,
    enable_prefix_caching: bool = True,
    scaling: ScalingPlan | None = None,
    is_coarse: bool = False,
    lora_load_s: float = 0.0,
    **changes: Any,
) -> Simulator:
    limits = CoarseLimits(changes.get("max_num_seqs", 4), 32, changes.get("num_blocks", 64) * 4)
    return Simulator(
        trace,
        lambda _: make_scheduler(
            max_inflight_steps=max_inflight_steps, enable_prefix_caching=enable_prefix_caching, **changes
        ),
        cost,
        num_rows=changes.get("max_num_seqs", 4),
        max_model_len=512,
        enable_prefix_caching=enable_prefix_caching,
        num_replicas=num_replicas,
        router=router,
        scaling=scaling,
        coarse=limits if is_coarse else None,
        lora_load_s=lora_load_s,
    )


def simulate(trace: Trace, **settings: Any) -> SimulationOutcomes:
    return simulator(trace, **settings).run()
