import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tidewheel.batch import SPARE_LOGITS
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, is_async
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import ConfigError
from tidewheel.fleet.scaling import ScalingSettings
from tidewheel.one_shot.adapters import with_kind
from tidewheel.one_shot.runner import BLOCKS_PER_ROW
from tidewheel.record.recorded_events import StepFeatures
from tidewheel.simulate.coarse_replica import CoarseLimits
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.fleet import ScalingPlan
from tidewheel.simulate.fleet_choice import make_scaling
from tidewheel.simulate.outcomes import Figures, throughput
from tidewheel.simulate.simulator import Simulator
from tidewheel.workload.arrivals import FloatArray, bursty_arrivals, poisson_arrivals, switching_arrivals
from tidewheel.workload.day_shapes import daily_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import PrefixMix, TenantMix, Trace, synthesise

ARRIVALS = {
    "poisson": poisson_arrivals,
    "bursty": bursty_arrivals,
    "switching": switching_arrivals,
    "daily": daily_arrivals,
}
CAPACITY_BATCHES = 8  # full batches that measure the capacity
UNBOUNDED = 1 << 30
MAX_REPLICAS = 256  # of `replicas_needed`
MODEL = "simulated"


class ScenarioResult(NamedTuple):
    policy: str
    load: float | None  # share of capacity; None: other rate
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    arrivals: str  # key of `ARRIVALS`, or a path
    recorded_trace: Trace | None
    num_requests: int
    rate: float | None
    loads: tuple[float, ...]
    prompt: Lengths
    output: Lengths
    max_tokens: int | None
    tenants: TenantMix
    prefixes: PrefixMix | None
    seed: int
    policies: tuple[str, ...]
    num_replicas: int
    router: str
    cost: CostModel
    settings: dict[str, str]
    record: str  # folder; empty: none
    scaling: str = ""  # policy; empty: `num_replicas` stay
    scaling_settings: ScalingSettings = ScalingSettings()  # noqa: RUF009 - immutable
    history: tuple[float, ...] = ()  # arrivals of earlier days
    is_coarse: bool = False
    lora_load_s: float = 0.5  # that an engine reads an adapter

    @property
    def num_runs(self) -> int:
        return len(self.policies) * max(len(self.loads), 1)

    def config(self, policy: str) -> EngineConfig:
        values = {"model": MODEL, **self.settings, "scheduling_policy": policy, "record": self.record}
        return EngineConfig.from_settings(with_kind(values))

    def trace(self, rate: float | None) -> Trace:
        """Return the request trace at `rate`; None: at the file's own rate."""
        if self.recorded_trace is not None:
            return self.recorded_trace if rate is None else self.recorded_trace.at_rate(rate)
        assert rate is not None
        rng = np.random.default_rng(self.seed)
        return self._synthesise(ARRIVALS[self.arrivals](self.num_requests, rate, rng), rng)

    def at_once(self, count: int) -> Trace:
        if self.recorded_trace is None:
            return self._synthesise(np.zeros(count), np.random.default_rng(self.seed))
        return self.recorded_trace.at_once(count)

    def _synthesise(self, arrivals: FloatArray, rng: np.random.Generator) -> Trace:
        return synthesise(arrivals, self.prompt, self.output, rng, tenants=self.tenants, prefixes=self.prefixes)

    def capacity(self, policy: str) -> float:
        config = dataclasses.replace(
            self.config(policy),
            record="",
            max_waiting_requests=UNBOUNDED,
            max_waiting_tokens=UNBOUNDED,
            scheduling_policy="fifo",
        )
        trace = self.at_once(CAPACITY_BATCHES * config.max_num_seqs)
        return throughput(self.simulator(config, trace, 1, is_scaled=False).run())

    def results(self) -> Iterator[ScenarioResult]:
        for policy in self.policies:
            rates: list[tuple[float | None, float | None]] = [(None, self.rate)]
            if self.loads:
                capacity = self.capacity(policy) * self.num_replicas
                rates = [(load, load * capacity) for load in self.loads]
            for load, rate in rates:
                simulator = self.simulator(self.config(policy), self.trace(rate), self.num_replicas)
                simulator.run()
                yield ScenarioResult(policy, load, simulator.summary())

    def replicas_needed(self, policy: str) -> tuple[int, Figures]:
        """Return the least number of replicas that keep up with `rate`, and their figures.

        Raise `ConfigError` if `MAX_REPLICAS` do not keep up.
        """
        assert self.rate is not None
        trace, config = self.trace(self.rate), self.config(policy)

        def figures(count: int) -> Figures:
            simulator = self.simulator(config, trace, count, is_scaled=False)
            simulator.run()
            return simulator.summary()

        count = min(max(1, math.ceil(self.rate / self.capacity(policy))), MAX_REPLICAS)
        found = figures(count)
        step = -1 if found["keeps_up"] else 1
        while 1 <= count + step <= MAX_REPLICAS:
            other = figures(count + step)
            if step < 0 and not other["keeps_up"]:
                return count, found
            count, found = count + step, other
            if step > 0 and found["keeps_up"]:
                return count, found
        if not found["keeps_up"]:
            raise ConfigError(f"{count} replicas do not keep up with {self.rate:g} requests/s of policy {policy}")
        return count, found

    def simulator(
        self, config: EngineConfig, trace: Trace, num_replicas: int, *, is_scaled: bool = True
    ) -> Simulator:
        cost = self.cost.with_cache(config.kv_cache_dtype)
        if trace.loras.any() and (self.is_coarse or not config.enable_lora):
            raise ConfigError("requests of the trace have adapters (lora): set enable_lora, and leave out --coarse")
        if config.kind != "text":
            trace = trace.without_text(config.kind)
        if config.pressure_quantization != "none" and (self.is_coarse or cost.quantized_share is None):
            raise ConfigError(
                f"pressure_quantization is {config.pressure_quantization}: simulate it without --coarse, and with a "
                "quantized_share in the cost model, from --calibrate of a recording that has quantised steps"
            )
        max_model_len = max(trace.max_num_tokens, 2)
        if config.kind == "iterative":  # a row has one block
            cost = dataclasses.replace(
                cost, block_size=max_model_len, num_blocks=BLOCKS_PER_ROW * config.max_num_seqs
            )
        info = simulated_info(config, cost, max_model_len=max_model_len)
        limits = CoarseLimits(info.max_num_seqs, info.max_num_batched_tokens, info.num_blocks * info.block_size)
        plan = self._plan() if is_scaled else None
        return simulator_of(
            config,
            info,
            trace,
            cost,
            num_replicas=num_replicas if plan is None else self.scaling_settings.min_replicas,
            router=self.router,
            max_tokens=self.max_tokens,
            coarse=limits if self.is_coarse else None,
            scaling=plan,
            lora_load_s=self.lora_load_s,
        )

    def _plan(self) -> ScalingPlan | None:
        if not self.scaling:
            return None
        policy = make_scaling(self.scaling, self.scaling_settings, self.history)
        return ScalingPlan(policy, self.scaling_settings.startup_s)


def simulator_of(
    config: EngineConfig, info: EngineInfo, trace: Trace, cost: CostModel, **deployment: Any
) -> Simulator:
    """Raise `ConfigError` for settings that cannot be simulated."""
    if config.speculation != "none" and (deployment.get("coarse") or cost.draft_acceptance is None):
        raise ConfigError(
            f"speculation is {config.speculation}: simulate it without --coarse, and with a draft_acceptance in the "
            "cost model, from --calibrate of a recording that has drafts, or from --draft-acceptance; or set "
            "speculation to none"
        )
    return Simulator(
        trace,
        lambda _: build_scheduler(config, info),
        cost,
        num_rows=info.max_num_seqs,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        session_ttl_s=config.session_ttl_s,
        has_free_drafts=config.speculation == "prompt_lookup",
        **deployment,
    )


def simulated_info(config: EngineConfig, cost: CostModel, *, max_model_len: int) -> EngineInfo:
    block_size = config.block_size or cost.block_size
    num_blocks = config.num_blocks or cost.num_blocks * cost.block_size // block_size
    device = cost.device or cost.name
    block_bytes = block_size * cost.kv_bytes_per_token
    num_host_blocks = int(config.swap_space * 2**30 / block_bytes)
    return EngineInfo(
        pid=0,
        model=config.model,
        architecture="simulated",
        device=device,
        dtype="",
        vocab_size=2**31 - 1,
        max_model_len=max_model_len if config.max_model_len == "auto" else config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        weights_bytes=round(cost.weights_bytes),
        activation_bytes=0,
        kv_cache_bytes=round(num_blocks * block_bytes),
        num_host_blocks=num_host_blocks,
        swap_seconds_per_block=cost.swap_seconds(1, block_size) if num_host_blocks else None,
        enable_prefix_caching=config.enable_prefix_caching,
        load_seconds=0.0,
        async_scheduling=is_async(config, device),
        decode_seconds=_decode_seconds(cost, min(config.max_num_seqs + SPARE_LOGITS, config.max_num_batched_tokens)),
    )


def _decode_seconds(cost: CostModel, most: int) -> list[tuple[int, float]]:
    """Return the seconds of steps of 1, 2, 4, … decodes, as an engine measures them at load."""
    sizes = [1 << exponent for exponent in range(most.bit_length())]
    return [(n, cost.step_seconds(StepFeatures(n, n, n, 0, n, 0)) + cost.turn_seconds(n)) for n in sizes]
