"""Host time of a refusal, paid by the thread that runs the steps.

    python benchmarks/refusal_cost.py [--waiting 1024 4096 8192 16384] [--policy …] [--tenants 1 16 4096 16384]
        [--repeats 1000] [--seconds 3] [--json] [--save]

Times are microseconds of one call:

* *full*: `Scheduler.add` raises `WaitingSetFull`, by policy, waiting requests and their tenants;
* *evicting*: a newcomer of a better class and another tenant replaces a waiting request, or is refused;
* *displacing*: one large prompt replaces 4,000 small requests, or is refused;
* *message*: decoding an engine message, `to_requests` and `add_group`, accepted or over the tenant's rate, with and
  without 1,024 biases.

Repeats start from the same waiting set and end after `--repeats` calls, or `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

import record
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest, EngineInfo, encoder, to_engine_decoder
from tidewheel.engine.requests import to_requests
from tidewheel.errors import Busy
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Priority, Request
from tidewheel.sampling import MAX_LOGIT_BIAS, SamplingParams, pack_biases
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.scheduler_config import SchedulerConfig
from tidewheel.tenants import TenantLimits

GOAL_US = 50.0
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
PROMPT_TOKENS = 16
NUM_DISPLACED = 4000
MIN_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    case: str
    outcome: str  # refused, accepted, evicts N
    policy: str
    waiting: int
    tenants: int
    repeats: int
    median_us: float
    p99_us: float
    max_us: float


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
            max_model_len=1 << 17,
            max_waiting_requests=setting.waiting,
            max_waiting_tokens=setting.waiting * PROMPT_TOKENS + setting.spare_tokens,
            policy=setting.policy,
            tenants={"limited": TenantLimits(requests_per_s=setting.requests_per_s)},
        )
        self.scheduler = Scheduler(config, KVCacheManager(1 << 14, BLOCK_SIZE, enable_prefix_caching=True))

    def fill(self, number: int) -> None:
        for _ in range(number):
            self.scheduler.add(self.request(priority=self.setting.priority), self.now)

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
            evicted = self.scheduler.add(request, self.now)
        except Busy:
            return (time.perf_counter_ns() - begin) / 1e3, "refused", 0
        microseconds = (time.perf_counter_ns() - begin) / 1e3
        return microseconds, f"evicts {len(evicted)}" if evicted else "accepted", len(evicted)


def repeat(once: Callable[[], tuple[float, str]], patience: Patience) -> tuple[list[float], str]:
    times: list[float] = []
    outcome = ""
    gc.collect()
    gc.freeze()
    end = time.perf_counter() + patience.seconds
    while len(times) < patience.repeats and (time.perf_counter() < end or len(times) < MIN_REPEATS):
        microseconds, outcome = once()
        times.append(microseconds)
    gc.unfreeze()
    return times, outcome


def cost(case: str, setting: Setting, once: Callable[[], tuple[float, str]], patience: Patience) -> Cost:
    once()
    times, outcome = repeat(once, patience)
    return Cost(
        case=case,
        outcome=outcome,
        policy=setting.policy,
        waiting=setting.waiting,
        tenants=setting.tenants,
        repeats=len(times),
        median_us=round(float(np.median(times)), 1),
        p99_us=round(float(np.quantile(times, 0.99)), 1),
        max_us=round(max(times), 1),
    )


def full(setting: Setting, patience: Patience) -> Cost:
    scene = Scene(setting)
    scene.fill(setting.waiting)

    def once() -> tuple[float, str]:
        microseconds, outcome, _ = scene.timed_add(scene.request(priority=Priority.LOW))
        return microseconds, outcome

    return cost("full", setting, once, patience)


def evicting(setting: Setting, patience: Patience) -> Cost:
    scene = Scene(setting)
    scene.fill(setting.waiting)

    def once() -> tuple[float, str]:
        newcomer = scene.request(tenant="new", priority=Priority.HIGH)
        microseconds, outcome, num_evicted = scene.timed_add(newcomer)
        scene.scheduler.cancel(newcomer.request_id)
        scene.fill(num_evicted)
        return microseconds, outcome

    return cost("evicting", setting, once, patience)


def displacing(setting: Setting, patience: Patience) -> Cost:
    scene = Scene(setting)
    scene.fill(setting.waiting)

    def once() -> tuple[float, str]:
        length = NUM_DISPLACED * PROMPT_TOKENS
        newcomer = scene.request(tenant="new", length=length, priority=Priority.HIGH)
        microseconds, outcome, num_evicted = scene.timed_add(newcomer)
        scene.scheduler.cancel(newcomer.request_id)
        scene.fill(num_evicted)
        return microseconds, outcome

    return cost("displacing", setting, once, patience)


ENGINE = EngineInfo(
    pid=0, model="none", architecture="none", device="none", dtype="", vocab_size=VOCAB_SIZE, max_model_len=1 << 17,
    max_num_seqs=8, max_num_batched_tokens=2048, block_size=BLOCK_SIZE, num_blocks=1 << 14, weights_bytes=0,
    activation_bytes=0, kv_cache_bytes=0, enable_prefix_caching=True, load_seconds=0.0,
)  # fmt: skip
CONFIG = EngineConfig(model="none")


def payload(scene: Scene, tenant: str, num_biases: int, n: int) -> bytes:
    bias_token_ids, bias_amounts = pack_biases(dict.fromkeys(range(num_biases), 1.0))
    request = AddRequest(
        next(scene.ids),
        scene.prompt.tobytes(),
        SamplingParams(max_tokens=16),
        tenant=tenant,
        n=n,
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
        scene.scheduler.add(scene.request(tenant=tenant, priority=Priority.LOW), scene.now)

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


COLUMNS = ("case", "outcome", "policy", "waiting", "tenants", "repeats", "median_us", "p99_us", "max_us")
WIDTHS = (27, 12, 9, 8, 8, 8, 10, 10, 10)


def show(values: tuple[object, ...]) -> None:
    print(" ".join(f"{value:>{width}}" for value, width in zip(map(str, values), WIDTHS, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 16, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=1000, help="calls of a case, at most")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a case, at most")
    parser.add_argument("--json", action="store_true", help="machine readable, one list")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/refusal_cost.json")
    options = parser.parse_args()
    environment = record.environment("numpy", "msgspec")
    if not options.json:
        print(f"{os.cpu_count()} cores; the goal for a refusal is {GOAL_US:g} us")
        show(COLUMNS)
    costs = []
    for found in measure(options):
        costs.append(asdict(found))
        if not options.json:
            show(tuple(costs[-1][name] for name in COLUMNS))
    if options.save:
        record.save("refusal_cost", {**environment, "unit": "us", "costs": costs})
    if options.json:
        print(json.dumps(costs))


if __name__ == "__main__":
    main()
