"""Host time of a refusal, which the thread that runs the steps pays, in microseconds.

    python benchmarks refusal_cost --save

* *full*: `Scheduler.add` raises `WaitingSetFull`;
* *evicting*: a newcomer of a better class and another tenant replaces a waiting request, or is refused;
* *displacing*: one large prompt replaces 4,000 small requests, or is refused;
* *message*: decoding an engine message, `to_requests` and `add_group`, accepted or over the tenant's rate.

Repeats start from the same waiting set.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.study import Study, show
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest, encoder, to_engine_decoder
from tidewheel.engine.requests import to_requests
from tidewheel.errors import Busy
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Priority, Request
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import MAX_LOGIT_BIAS, LogitBias, SamplingParams
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.scenario import simulated_info
from tidewheel.tenants import TenantLimits

GOAL_US = 50.0
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 17
NUM_BLOCKS = 1 << 14
PROMPT_TOKENS = 16
NUM_DISPLACED = 4000
MIN_REPEATS = 3


Cost = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    policy: str
    waiting: int  # all that may wait
    tenants: int = 1
    spare_tokens: int = 1 << 20
    priority: Priority = Priority.LOW
    requests_per_s: float | None = None  # by tenant


@dataclass(frozen=True, slots=True)
class Patience:
    repeats: int
    seconds: float


class Scene:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ids = itertools.count()
        self.prompt = np.arange(3, 3 + PROMPT_TOKENS, dtype=np.int32)
        self.now = 1000.0
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=MAX_MODEL_LEN,
            max_waiting_requests=setting.waiting,
            max_waiting_tokens=setting.waiting * PROMPT_TOKENS + setting.spare_tokens,
            policy=setting.policy,
            tenants={"limited": TenantLimits(requests_per_s=setting.requests_per_s)},
        )
        self.scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True))

    def fill(self, number: int) -> None:
        for _ in range(number):
            self.scheduler.add_group([self.request(priority=self.setting.priority)], self.now)

    def request(self, *, tenant: str | None = None, length: int = PROMPT_TOKENS, priority: Priority) -> Request:
        number = next(self.ids)
        self.now += 1e-6
        return Request(
            f"request-{number}",
            self.prompt if length == PROMPT_TOKENS else np.full(length, 5, dtype=np.int32),
            SamplingParams(max_tokens=16),
            max_tokens=16,
            arrival_time=self.now,
            priority=priority,
            tenant=f"tenant-{number % self.setting.tenants}" if tenant is None else tenant,
        )

    def timed_add(self, request: Request) -> tuple[float, str, int]:
        begin = time.perf_counter_ns()
        try:
            evicted = self.scheduler.add_group([request], self.now)
        except Busy:
            return (time.perf_counter_ns() - begin) / 1e3, "refused", 0
        microseconds = (time.perf_counter_ns() - begin) / 1e3
        return microseconds, f"evicts {len(evicted)}" if evicted else "accepted", len(evicted)


def cost(case: str, setting: Setting, once: Callable[[], tuple[float, str]], patience: Patience) -> Cost:
    once()
    times: list[float] = []
    outcome = ""  # refused, accepted, evicts N
    gc.collect()
    gc.freeze()
    end = time.perf_counter() + patience.seconds
    while len(times) < patience.repeats and (time.perf_counter() < end or len(times) < MIN_REPEATS):
        microseconds, outcome = once()
        times.append(microseconds)
    gc.unfreeze()
    return {
        "case": case,
        "outcome": outcome,
        "policy": setting.policy,
        "waiting": setting.waiting,
        "tenants": setting.tenants,
        "repeats": len(times),
        "median_us": round(float(np.median(times)), 1),
        "p99_us": round(float(np.quantile(times, 0.99)), 1),
        "max_us": round(max(times), 1),
    }


def newcomer(case: str, setting: Setting, patience: Patience, **fields: Any) -> Cost:
    """Add such a request to a full waiting set."""
    scene = Scene(setting)
    scene.fill(setting.waiting)

    def once() -> tuple[float, str]:
        request = scene.request(**fields)
        microseconds, outcome, num_evicted = scene.timed_add(request)
        if outcome != "refused":
            scene.scheduler.cancel(request.request_id)
        scene.fill(num_evicted)
        return microseconds, outcome

    return cost(case, setting, once, patience)


full = partial(newcomer, "full", priority=Priority.LOW)
evicting = partial(newcomer, "evicting", tenant="new", priority=Priority.HIGH)
displacing = partial(
    newcomer, "displacing", tenant="new", length=NUM_DISPLACED * PROMPT_TOKENS, priority=Priority.HIGH
)


CONFIG = EngineConfig(model="none", max_num_seqs=8, max_num_batched_tokens=2048, num_blocks=NUM_BLOCKS)
ENGINE = simulated_info(CONFIG, H200_8B, max_model_len=MAX_MODEL_LEN)


def payload(scene: Scene, tenant: str, num_biases: int, n: int) -> bytes:
    bias_token_ids, bias_amounts = LogitBias.of(dict.fromkeys(range(num_biases), 1.0)).to_bytes()
    request = AddRequest(
        next(scene.ids),
        scene.prompt.tobytes(),
        SamplingParams(max_tokens=16),
        options=RequestOptions(tenant=tenant, n=n),
        bias_token_ids=bias_token_ids,
        bias_amounts=bias_amounts,
    )
    return encoder.encode(request)


def message(name: str, setting: Setting, patience: Patience, *, num_biases: int = 0, n: int = 1) -> Cost:
    """Measure a message, of a tenant over its rate if the setting has one."""
    scene = Scene(setting)
    tenant = "limited" if setting.requests_per_s else "free"
    scene.fill(setting.waiting // 2)
    if setting.requests_per_s:
        scene.scheduler.add_group([scene.request(tenant=tenant, priority=Priority.LOW)], scene.now)

    def once() -> tuple[float, str]:
        raw = payload(scene, tenant, num_biases, n)
        names = [f"message-{next(scene.ids)}" for _ in range(n)]
        scene.now += 1e-6
        begin = time.perf_counter_ns()
        outcome = handle(scene, raw, names)
        microseconds = (time.perf_counter_ns() - begin) / 1e3
        for name in names:
            scene.scheduler.cancel(name)
        return microseconds, outcome

    return cost(name, setting, once, patience)


def handle(scene: Scene, raw: bytes, names: list[str]) -> str:
    decoded = to_engine_decoder.decode(raw)
    assert isinstance(decoded, AddRequest)
    requests = to_requests(decoded, ENGINE, CONFIG, request_ids=names, seed=0, now=scene.now)
    try:
        scene.scheduler.add_group(requests, scene.now)
    except Busy:
        return "refused"
    return "accepted"


def measure(options: argparse.Namespace) -> Iterator[Cost]:
    patience = Patience(options.repeats, options.seconds)
    for policy, waiting, tenants in itertools.product(options.policy, options.waiting, options.tenants):
        setting = Setting(policy=policy, waiting=waiting, tenants=tenants)
        yield full(setting, patience)
        yield evicting(setting, patience)
    for policy, tenants in itertools.product(options.policy, (16, 4096)):
        crowd = Setting(policy=policy, waiting=8192, tenants=tenants, spare_tokens=0)
        yield displacing(crowd, Patience(max(MIN_REPEATS, options.repeats // 50), options.seconds))
    for number in (0, MAX_LOGIT_BIAS):
        limited = Setting(policy="priority", waiting=4096, requests_per_s=1e-6)
        yield message(f"message, rate, {number} biases", limited, patience, num_biases=number)
        free = Setting(policy="priority", waiting=4096)
        yield message(f"message, {number} biases", free, patience, num_biases=number)
    yield message("message, n=16", Setting(policy="priority", waiting=4096), patience, n=16)


def main() -> None:
    study = Study("refusal_cost", __doc__, "numpy", "msgspec")
    study.add_argument("--waiting", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    study.add_argument("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    study.add_argument("--tenants", type=int, nargs="+", default=[1, 16, 4096, 16384])
    study.add_argument("--repeats", type=int, default=1000, help="calls of a case, at most")
    study.add_argument("--seconds", type=float, default=3.0, help="of a case, at most")
    options = study.begin()
    costs = list(measure(options))
    show(costs)
    print(f"the goal for a refusal is {GOAL_US:g} us")
    study.save({"unit": "us", "columns": list(costs[0]), "costs": [list(one.values()) for one in costs]})


if __name__ == "__main__":
    main()
