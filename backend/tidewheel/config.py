"""Engine settings, with vLLM's names for equal concepts. A wrong key or value raises `ConfigError`."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidewheel.errors import ConfigError
from tidewheel.lora import parse_loras, read_multi_lora
from tidewheel.sampling import MAX_LOGPROBS
from tidewheel.settings import ENTRY_ARGUMENTS, HONOURED, check_known, take_settings, translate
from tidewheel.tenants import parse_tenants

DType = Literal["auto", "float32", "bfloat16", "float16"]
CacheDType = Literal["auto", "fp8_e4m3", "int8"]
Quantization = Literal["auto", "none", "fp8", "int8", "int4"]
PressureQuantization = Literal["none", "int8", "int4"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
PolicyName = Literal["fifo", "priority", "sjf", "deadline", "fair", "density"]
StrategyName = Literal["continuous", "static", "dynamic", "predictive", "hybrid"]
PreemptionMode = Literal["auto", "recompute", "swap"]
MaxModelLen = int | Literal["auto"]
Kind = Literal["text", "one_shot", "iterative"]
SpeculationMethod = Literal["none", "prompt_lookup", "first_layers", "draft_model", "eagle3"]

REMOTE = "triton"  # adapter of models that another backend serves
MODEL_NOT_SET = "model is not set: give a folder or a Hugging Face id"
BLOCK_SIZES = (16, 32, 64, 128)
MAX_DRAFT_TOKENS = 32  # of a row in a step
_AT_LEAST_ONE = (
    "max_num_seqs", "max_num_batched_tokens", "max_waiting_requests", "max_waiting_tokens", "predictor_prior_tokens",
    "long_prefill_token_threshold", "max_model_len", "num_threads", "max_prompt_bytes", "num_blocks",
    "kv_cache_memory_mb", "batch_size", "hybrid_threshold", "hybrid_backlog", "max_sessions", "session_max_blocks",
    "max_input_mb", "tensor_parallel_size", "max_loras", "max_cpu_loras",
)  # fmt: skip
_RANGES: Mapping[str, tuple[float, float | None]] = {
    **dict.fromkeys(_AT_LEAST_ONE, (1, None)),
    **dict.fromkeys(("max_preemptions", "seed", "max_logprobs"), (0, None)),
    "gpu_memory_utilization": (0.05, 1.0),
    "engine_start_timeout_s": (0.001, 86_400.0),
    "ageing_s": (0.001, 86_400.0),
    "breaker_error_rate": (0.01, 1.0),
    "breaker_queue_time_s": (0.001, 86_400.0),
    "swap_space": (0.0, 4096.0),
    "batch_timeout_ms": (0.0, 60_000.0),
    "batch_target_latency_ms": (1.0, 3_600_000.0),
    "target_tpot_ms": (0.01, 60_000.0),
    "governor_target_latency_ms": (0.01, 60_000.0),
    "pressure_memory": (0.01, 1.0),
    "pressure_latency_ms": (0.01, 60_000.0),
    "max_lora_rank": (1, 256),
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
    "num_draft_layers": (1, None),
    "device_slice_ms": (0.0, 60_000.0),
    "device_weight": (0.01, 100.0),
    "device_memory_share": (0.01, 1.0),
    "max_session_ttl_s": (0.0, 7 * 86_400.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """Engine settings that the scheduler reads directly."""

    # steps
    max_num_seqs: int = 256  # most requests that run at once
    max_num_batched_tokens: int = 2048  # token budget of a step

    # policies
    ageing_s: float = 10.0  # seconds after which a waiting request rises a class, repeatedly, up to HIGH
    cache_aware_order: bool = True  # inside a class, the longest cached prefix first, until others waited `ageing_s`
    predictor_prior_tokens: int = 128  # output length assumed until requests have ended
    long_prefill_token_threshold: int | None = None  # most prompt tokens of one request in a step; none: the budget

    # admission
    max_waiting_requests: int = 1024  # most requests that have not started
    max_waiting_tokens: int = 1 << 22  # most prompt tokens of these
    breaker_error_rate: float | None = None  # error rate above which the breaker opens; none: no rate does
    breaker_queue_time_s: float | None = None  # wait above which the breaker opens; none: no wait does

    # preemption
    admit_by_growth: bool = True  # a request enters only where running ones are expected to find blocks to grow into
    preemption_mode: PreemptionMode = "auto"  # how a victim comes back; auto: the cheaper way, by the cost model
    max_preemptions: int = 4  # preemptions of one request, while another victim can be found

    # strategies
    scheduling_strategy: StrategyName = "continuous"  # continuous: requests join in any step; the others form batches
    batch_size: int | None = None  # static: requests of a batch; none: max_num_seqs
    batch_timeout_ms: float = 50.0  # static: longest wait of a partial batch
    batch_target_latency_ms: float = 1000.0  # dynamic, hybrid: what the window is steered to
    hybrid_threshold: int = 8  # hybrid: with fewer running and waiting, requests join at once
    hybrid_backlog: int = 256  # hybrid: with more waiting, requests join at once

    # controllers
    enable_seqs_governor: bool = False  # a governor moves the number of running requests between 1 and max_num_seqs
    target_tpot_ms: float | None = None  # time per output token that a controller of the budget holds; none: off
    governor_target_latency_ms: float | None = None  # time of a token for the governor; none: memory alone
    pressure_memory: float = 0.9  # share of KV blocks in use above which quantised weights compute
    pressure_latency_ms: float = 500.0  # wait of the oldest request, or time of a decoding step, above which they do
    pressure_quantization_critical: bool = False  # they also compute steps with a CRITICAL request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SchedulingSettings):
    # model
    model: str  # a folder or GGUF file, relative to the entry's version folder, or a Hugging Face id
    revision: str = ""  # branch, tag or commit of a Hugging Face id; empty: the main branch
    download_dir: str = ""  # folder for models of a Hugging Face id; empty: Hugging Face's cache
    tokenizer: str = ""  # a folder; empty: the model's
    dtype: DType = "auto"  # auto: bfloat16 or the files' float16; on a CPU float32, unless it and files have bfloat16
    quantization: Quantization = "auto"  # auto: weights as stored; none: as dtype; fp8, int8, int4: rounded at load
    pressure_quantization: PressureQuantization = "none"  # format of a copy of the weights for times of pressure
    deterministic: bool = False  # a request's tokens do not depend on what else runs; slower, native models on a GPU
    device: Device = "auto"  # auto: cuda if torch sees a GPU
    load_format: LoadFormat = "auto"  # dummy: random weights made on the device
    seed: int = 0  # start of the random draws of requests that bring none
    max_model_len: MaxModelLen = "auto"  # tokens of prompt and output of one request; auto: the model's, or what fits
    generation_config: str = ""  # default sampling: auto (the model's), vllm (none), or a folder; LLM: auto, if empty
    override_generation_config: str = "{}"  # default sampling over that of generation_config
    tensor_parallel_size: int = 1  # ranks that share the model, each on a GPU or core; sizes of memory are of each
    max_logprobs: int = 20  # most log-probabilities that a request may ask for per token
    num_threads: int | None = None  # CPU threads of each rank; none: all free cores, one for small models
    engine_start_timeout_s: float = 600.0  # how long a model may load, in seconds

    # adapters
    enable_lora: bool = False  # requests may name a LoRA adapter; native text models
    max_loras: int = 8  # adapters that compute in one step, each in a slot of the device; at most max_cpu_loras
    max_lora_rank: int = 16  # largest rank of an adapter; on a GPU each slot takes memory for it
    max_cpu_loras: int | None = None  # adapters kept in host memory; none: four times max_loras
    lora_modules: str = ""  # folders of adapters by name; empty: those of multi_lora.json in the version folder
    lora_dir: str = "loras"  # clients load adapters from folders below it; relative to the version folder
    lora_limits: str = ""  # requests and tokens per second, by adapter

    # KV cache
    kv_cache_dtype: CacheDType = "auto"  # auto: the model's; fp8_e4m3, fp8: 8-bit floats; int8: integers, on a CPU
    block_size: int | None = None  # tokens of a block: 16, 32, 64 or 128; none: 64 on CUDA, 16 on a CPU
    num_blocks: int | None = None  # blocks of the cache; none: as many as its memory holds
    kv_cache_memory_mb: int | None = None  # MiB of the cache; none: half the free memory, or gpu_memory_utilization
    gpu_memory_utilization: float = 0.9  # part of the GPU for weights, activations, graphs, cache; no effect on a CPU
    enable_prefix_caching: bool = True  # requests reuse the blocks of prompts that begin alike

    # steps
    enforce_eager: bool = False  # run without CUDA graphs; no effect on a CPU
    async_scheduling: bool | None = None  # launch a step before the tokens of the last are read; none: on CUDA

    # speculation
    speculation: SpeculationMethod = "none"  # source of draft tokens, of which the model checks several in a step
    num_speculative_tokens: int = 8  # most drafts of a request in a step; fewer, or none, where they do not pay
    draft_model: str = ""  # draft model or EAGLE-3 head: folder, GGUF file or id
    num_draft_layers: int | None = None  # number of layers that draft, of first_layers; none: a quarter of all

    # one-shot models
    kind: Kind = "text"  # set by the backend if `adapter`, or the model's file, says so
    adapter: str = ""  # what runs a one-shot model, such as onnxruntime; empty: as its file says, or a text model
    adapter_options: str = "{}"  # what the adapter alone reads, by its page in the documentation
    buckets: str = "{}"  # sizes by dynamic dimension, to which inputs are padded with zeros: fewer shapes to batch
    batch_axes: str = "{}"  # batch dimension by tensor; null: none; not named: the first, if all tensors have it
    max_input_mb: int = 64  # MiB of all inputs of a request; a larger one is refused before it is copied
    check_finite: bool = True  # a request whose outputs have NaN or infinite numbers ends with an error

    # sharing a device
    device_slice_ms: float = 20.0  # longest batch of a one-shot model beside other engines; 0: no turns with them
    device_weight: float = 1.0  # part of the device's time beside engines of weight 1
    device_memory_share: float | None = None  # part of the device's memory that the engine may take; none: no limit

    # metrics
    served_model_name: str = ""  # label model_name of metrics; empty: the name of the entry
    disable_log_stats: bool = False  # publish no figures on /metrics

    # records and checks
    record: str = ""  # folder for a recording of every decision, for `tidewheel simulate`; empty: none
    debug_invariants: bool = False  # check that ended requests hold nothing, whenever the engine is idle: for tests

    # policies
    scheduling_policy: PolicyName = "priority"  # which waiting request is served first
    tenants: str = ""  # weights, limits and rights by tenant

    # admission
    max_prompt_bytes: int = 1 << 22  # longest prompt; a longer one is refused before tokenisation

    # preemption
    swap_space: float = 0.0  # GiB of host memory behind the KV cache

    # sessions
    session_ttl_s: float = 300.0  # how long a session is kept if its request names no time
    max_session_ttl_s: float = 3600.0  # longest time that a request may ask for
    max_sessions: int = 4096  # sessions of all tenants; over it the tenant with most loses one
    session_max_blocks: int | None = None  # blocks of one session; none: its context

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(MODEL_NOT_SET)
        for name, (low, high) in {**_RANGES, "session_ttl_s": (0.0, self.max_session_ttl_s)}.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not low <= value <= (math.inf if high is None else high):
                limits = f"at least {low}" if high is None else f"{low:g} to {high:g}"
                raise ConfigError(f"{name} is {value}: it must be {limits}")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}: it must be at most {MAX_LOGPROBS}")
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
        parse_tenants(self.tenants)
        parse_tenants(self.lora_limits, "lora_limits")
        parse_loras(self.lora_modules)
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        given = self.to_settings()
        for name, values, other, allowed, reason in _NEEDS:
            found = getattr(self, other)
            if name in given and (not values or given[name] in values) and found not in allowed:
                raise ConfigError(
                    f"{name} is {str(given[name])[:80]}, and {other} is {found}: {reason}; "
                    f"set {other} to {' or '.join(map(str, allowed))}, or leave {name} out"
                )
        if (self.kind == "text") == bool(self.adapter):
            raise ConfigError(
                f"kind is {self.kind}, and adapter {self.adapter!r}: leave kind out, and name an adapter"
            )
        for name in sorted((ONE_SHOT_ONLY if self.kind == "text" else TEXT_ONLY) & given.keys()):
            raise ConfigError(f"{name} is set, and a model of kind {self.kind} does not read it: leave it out")
        if self.batch_size is not None and self.batch_size > self.max_num_seqs:
            raise ConfigError(f"batch_size is {self.batch_size}: max_num_seqs allows {self.max_num_seqs}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, and max_loras {self.max_loras}: adapters on the device stay "
                "in host memory too; raise max_cpu_loras, or lower max_loras"
            )
        if self.speculation in _DRAFT_MODELS and not self.draft_model:
            raise ConfigError(f"speculation is {self.speculation}, and draft_model is not set: give its folder")
        if self.speculation != "none" and self.max_num_batched_tokens <= self.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a step tests them beside the last token; lower the first"
            )
        if self.preemption_mode == "swap" and self.swap_space == 0.0:
            raise ConfigError("preemption_mode is swap, and swap_space is 0: give it host memory, in GiB")

    @classmethod
    def from_settings(cls, settings: Mapping[str, object], *, base_dir: Path | None = None) -> "EngineConfig":
        """Return the config from text or JSON values, by our names or vLLM's. `base_dir`: base of relative paths."""
        translated = translate(settings)
        for key in ENTRY_ARGUMENTS & translated.keys():
            raise ConfigError(f"{key} is a setting of an entry of a model repository, not of an engine: leave it out")
        check_known(translated, (HONOURED.keys() | setting_names()) - ENTRY_ARGUMENTS)
        values = take_settings(cls, translated)
        if "model" not in values:
            raise ConfigError(MODEL_NOT_SET)
        if values.get("tokenizer") == values["model"]:
            del values["tokenizer"]
        for key in ("model", "tokenizer", "generation_config", "draft_model"):
            if values.get(key) and base_dir is not None and (base_dir / str(values[key])).exists():
                values[key] = str((base_dir / str(values[key])).resolve())
        if (max_cpu_loras := values.get("max_cpu_loras")) is not None:
            values.setdefault("max_loras", max(1, min(cls.__dataclass_fields__["max_loras"].default, max_cpu_loras)))
        if values.get("enable_lora") and base_dir is not None:
            values["lora_dir"] = str((base_dir / values.get("lora_dir", "loras")).resolve())
            if not values.get("lora_modules") and (folders := read_multi_lora(base_dir)):
                values["lora_modules"] = json.dumps(folders)
        return cls(**values)

    @property
    def is_remote(self) -> bool:
        """Return whether front ends run the batches, by calls of another model."""
        return self.adapter == REMOTE

    @property
    def has_automatic_cache(self) -> bool:
        """Return whether free memory decides the size of the KV cache."""
        return self.num_blocks is None and self.kv_cache_memory_mb is None

    def can_become(self, other: "EngineConfig") -> bool:
        """Return whether a running engine with these settings can switch to `other` between two steps."""
        if self.record or other.record:  # a recording holds for one set of settings
            return self == other
        fits = all(getattr(other, name) <= getattr(self, name) for name in SIZED)
        return fits and self._settings_without(LIVE) == other._settings_without(LIVE)

    def fixed_settings(self) -> dict[str, object]:
        """Return the settings whose change, or for `SIZED` whose growth, needs a new engine."""
        return self._settings_without(frozenset() if self.record else LIVE - SIZED)

    def _settings_without(self, names: frozenset[str]) -> dict[str, object]:
        return {name: value for name, value in self.to_settings().items() if name not in names}

    def to_settings(self) -> dict[str, object]:
        """Return `model` and the settings that differ from the defaults."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name == "model"
        }


PRESSURE_SETTINGS = frozenset({"pressure_memory", "pressure_latency_ms", "pressure_quantization_critical"})
_DRAFT_MODELS = ("draft_model", "eagle3")
_GOVERNED = ("continuous", "dynamic", "hybrid")
_DRAFTERS = ("first_layers", *_DRAFT_MODELS)
_UNREAD = "it has no effect then"
# Setting, values of it that need something (none: any but the default), another setting, values it may have, reason.
_NEEDS: tuple[tuple[str, tuple[object, ...], str, tuple[object, ...], str], ...] = (
    ("batch_size", (), "scheduling_strategy", ("static",), _UNREAD),
    ("governor_target_latency_ms", (), "enable_seqs_governor", (True,), _UNREAD),
    ("lora_modules", (), "enable_lora", (True,), _UNREAD),
    ("num_speculative_tokens", (), "speculation", ("prompt_lookup", *_DRAFTERS), _UNREAD),
    ("num_draft_layers", (), "speculation", ("first_layers",), _UNREAD),
    ("draft_model", (), "speculation", _DRAFT_MODELS, _UNREAD),
    *((name, (), "pressure_quantization", ("int8", "int4"), _UNREAD) for name in sorted(PRESSURE_SETTINGS)),
    ("pressure_quantization", (), "quantization", ("auto", "none"), "a copy is made of exact weights"),
    ("pressure_quantization", (), "deterministic", (False,), "a copy has other results"),
    ("deterministic", (), "quantization", ("auto", "none"), "sums of 8 bits may depend on the batch"),
    ("deterministic", (), "tensor_parallel_size", (1,), "sums over ranks may depend on the batch"),
    ("speculation", _DRAFTERS, "tensor_parallel_size", (1,), "ranks do not draft, unless by prompt_lookup"),
    ("num_blocks", (), "kv_cache_memory_mb", (None,), "both set the size of the KV cache"),
    ("target_tpot_ms", (), "scheduling_strategy", (*_GOVERNED, "predictive"), "a static batch runs to its end"),
    ("enable_seqs_governor", (), "scheduling_strategy", _GOVERNED, "both set the number of running requests"),
    ("swap_space", (), "enable_prefix_caching", (True,), "it keeps blocks by their content"),
)
ONE_SHOT_ONLY = frozenset({"adapter", "adapter_options", "buckets", "batch_axes", "max_input_mb", "check_finite"})
TEXT_ONLY = PRESSURE_SETTINGS | {
    "revision", "download_dir", "tokenizer", "dtype", "quantization", "pressure_quantization", "deterministic",
    "load_format", "seed", "max_model_len", "generation_config", "override_generation_config", "max_logprobs",
    "kv_cache_dtype", "block_size", "num_blocks", "kv_cache_memory_mb", "gpu_memory_utilization", "enforce_eager",
    "max_prompt_bytes", "swap_space", "session_ttl_s", "max_session_ttl_s", "max_sessions", "session_max_blocks",
    "predictor_prior_tokens", "long_prefill_token_threshold", "preemption_mode", "max_preemptions",
    "target_tpot_ms", "tensor_parallel_size", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
    "lora_dir", "lora_modules", "lora_limits", "speculation", "num_speculative_tokens", "num_draft_layers",
    "draft_model",
}  # fmt: skip
# Settings that a running engine takes between two steps; those that size its buffers, up to what it started with.
SIZED = frozenset({"max_num_seqs", "max_num_batched_tokens"})
LIVE = frozenset(field.name for field in dataclasses.fields(SchedulingSettings)) | {
    "engine_start_timeout_s", "scheduling_policy", "tenants", "max_prompt_bytes", "session_ttl_s",
    "max_session_ttl_s", "max_sessions", "session_max_blocks", "generation_config", "override_generation_config",
    "max_logprobs", "lora_limits", "lora_modules",
}  # fmt: skip


def describe_changes(before: EngineConfig, after: EngineConfig) -> str:
    pairs = ((f.name, getattr(before, f.name), getattr(after, f.name)) for f in dataclasses.fields(EngineConfig))
    return ", ".join(f"{name} {old!r} → {new!r}" for name, old, new in pairs if old != new)


def setting_names() -> list[str]:
    return [field.name for field in dataclasses.fields(EngineConfig)]
