"""Table of every metric that Tidewheel publishes or reads."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]
Owner = Literal["engine", "tenant", "lora", "requests", "gateway", "health port", "triton"]


class Metric(NamedTuple):
    owner: Owner  # of the figures that it is made from
    kind: Kind
    name: str
    help: str
    source: str | Mapping[str, str] = ""  # field of the figures, or fields by value of `label`; empty: computed
    label: str = ""  # beside the model's labels; `class`: a series for each QoS class


_gauge = partial(Metric, "engine", "gauge")
_counter = partial(Metric, "engine", "counter")
_class_gauge = partial(Metric, "engine", "gauge", label="class")
_class_counter = partial(Metric, "engine", "counter", label="class")
_tenant = partial(Metric, "tenant", "counter", label="tenant")
_lora_gauge = partial(Metric, "lora", "gauge", label="lora")
_lora = partial(Metric, "lora", "counter", label="lora")
_requests = partial(Metric, "requests", "counter")
_errors = partial(Metric, "requests", "counter", label="tag")
_by_class = partial(Metric, "requests", "counter", label="class")
_histogram = partial(Metric, "requests", "histogram")
_gateway_counter = partial(Metric, "gateway", "counter")
_upstream_gauge = partial(Metric, "gateway", "gauge", label="upstream")
_health_gauge = partial(Metric, "health port", "gauge")
_triton_gauge = partial(Metric, "triton", "gauge")
_triton_counter = partial(Metric, "triton", "counter")

# Gauges of the engine: fields of `stats.EngineStats`.
RUNNING = _gauge("vllm:num_requests_running", "Requests in the running set", "num_running")
WAITING = _gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled", "num_waiting")
KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it", "kv_usage")
OLD_KV_USAGE = _gauge("vllm:gpu_cache_usage_perc", "The same, by its older name", "kv_usage")
WAITING_TOKENS = _gauge("tidewheel_waiting_tokens", "Prompt tokens of waiting requests", "num_waiting_tokens")
WAITING_BY_CLASS = _class_gauge("tidewheel_requests_waiting", "Waiting requests of one QoS class", "waiting_by_class")
LONGEST_WAIT = _class_gauge("tidewheel_wait_max_seconds", "Longest wait of started requests", "max_wait_by_class")
OLDEST_WAIT = _class_gauge("tidewheel_wait_oldest_seconds", "Age of oldest waiting request", "oldest_wait_by_class")
BLOCKS_CACHED = _gauge("tidewheel_kv_blocks_cached", "Free blocks with content to reuse", "num_cached_blocks")
FRAGMENTATION = _gauge("tidewheel_kv_fragmentation", "Share of taken blocks' slots with no token", "kv_fragmentation")
SLOTS_WASTED = _gauge("tidewheel_kv_slots_wasted", "Slots after the last token of a row", "num_wasted_slots")
HOST_BLOCKS = _gauge("tidewheel_kv_host_blocks", "Blocks of the host tier", "num_host_blocks")
HOST_BLOCKS_FREE = _gauge("tidewheel_kv_host_blocks_free", "Empty or evictable host blocks", "num_free_host_blocks")
SESSIONS = _gauge("tidewheel_sessions", "Sessions that are kept", "num_sessions")
SESSIONS_PAUSED = _gauge("tidewheel_sessions_paused", "Sessions whose tools or next turn run", "num_paused_sessions")
SESSION_BLOCKS = _gauge("tidewheel_session_blocks", "Blocks that sessions alone hold", "num_session_blocks")
LORA_SLOTS = _gauge("tidewheel_lora_slots_used", "Adapters in slots of the device", "num_lora_slots")
BUSY = _gauge("tidewheel_engine_busy_fraction", "Step time over wall time", "busy_fraction")
TOKEN_BUDGET = _gauge("tidewheel_token_budget", "Tokens that a step may compute now", "token_budget")
MAX_NUM_SEQS = _gauge("tidewheel_max_num_seqs", "Requests that may run now", "max_num_seqs")
BREAKER = _gauge("tidewheel_breaker_state", "0 closed, 1 half open, 2 open", "breaker_state")
PREDICTION_ERROR = _gauge("tidewheel_prediction_error_tokens", "Mean error of predicted lengths", "prediction_error")
# Triton makes load headers of this one.
CACHE_BLOCKS = _gauge("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks", label="kv_cache_block_type")
CACHE_CONFIG = _gauge("vllm:cache_config_info", "1; its labels are the size of the KV cache")
ENGINE_READY = _gauge("tidewheel_engine_ready", "1 if the engine takes requests, 0 if it does not")

PREFIX_QUERIES = _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up", "num_prefix_queries")
PREFIX_HITS = _counter("vllm:prefix_cache_hits_total", "Prompt tokens found", "num_prefix_hits")
PREEMPTIONS = _counter("vllm:num_preemptions_total", "Preemptions", "num_preemptions")
SWAP_PREEMPTIONS = _counter("tidewheel_swap_preemptions_total", "Preemptions to host memory", "num_swap_preemptions")
STEPS = _counter("tidewheel_steps_total", "Steps", "num_steps")
STEPS_BY_WEIGHTS = _counter(
    "tidewheel_weight_steps_total",
    "Steps with full or, under pressure, quantised weights",
    {"full": "num_full_steps", "quantized": "num_quantized_steps"},
    label="weights",
)
STEP_SECONDS = _counter("tidewheel_step_seconds_total", "Time in steps", "step_seconds")
TURN_WAIT = _counter("tidewheel_turn_wait_seconds_total", "Wait for turns on the device", "turn_wait_seconds")
SCHEDULED_TOKENS = _counter("tidewheel_scheduled_tokens_total", "Tokens computed, drafts too", "num_scheduled_tokens")
STARTED = _class_counter("tidewheel_requests_started_total", "Requests that started", "started_by_class")
EVICTED = _class_counter("tidewheel_requests_evicted_total", "Requests displaced by newcomers", "evicted_by_class")
SHED = _class_counter("tidewheel_requests_shed_total", "Requests refused by the breaker", "num_shed_by_class")
OBJECTIVES = _class_counter(
    "tidewheel_objectives_total", "Ended and refused requests with ttft_ms or tpot_ms", "objectives_by_class"
)
OBJECTIVES_MET = _class_counter(
    "tidewheel_objectives_met_total", "Of these, requests that met them", "objectives_met_by_class"
)
RATE_LIMITED = _counter("tidewheel_requests_rate_limited_total", "Requests over a tenant's rates", "num_rate_limited")
EXPIRED = _counter("tidewheel_requests_expired_total", "Requests whose deadline passed", "num_expired")
HOPELESS = _counter("tidewheel_requests_hopeless_total", "Requests whose deadline could not be met", "num_hopeless")
AGED = _counter("tidewheel_requests_aged_total", "Lifts of waiting requests by one class", "num_aged")
DOWNGRADED = _counter(
    "tidewheel_requests_downgraded_total",
    "Requests that dropped a class",
    {"quota": "num_downgraded_quota", "deadline": "num_downgraded_deadline", "objective": "num_downgraded_objective"},
    label="reason",
)
PREDICTIONS = _counter("tidewheel_predictions_total", "Ended requests with a predicted length", "num_predictions")
BLOCKS_SWAPPED = _counter(
    "tidewheel_kv_blocks_swapped_total",
    "Blocks copied between device and host tier",
    {"out": "num_swapped_out", "in": "num_swapped_in"},
    label="direction",
)
QUERIED_TOKENS = _counter(
    "tidewheel_kv_queried_tokens_total", "Tokens of requests that entered the running set", "num_hit_queries"
)
HIT_TOKENS = _counter(
    "tidewheel_kv_hit_tokens_total",
    "Tokens of requests that entered the running set and were found in the cache",
    {"device": "num_device_hits", "host": "num_host_hits"},
    label="tier",
)
DRAFTS = _counter("vllm:spec_decode_num_drafts_total", "Steps of a request that tested drafts", "num_drafts")
DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens_total", "Tokens drafted and tested", "num_draft_tokens")
ACCEPTED_DRAFT_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted", "num_accepted_draft_tokens"
)
LORA_LOADS = _counter("tidewheel_lora_loads_total", "Copies of adapters into slots", "num_lora_loads")
LORA_EVICTIONS = _counter("tidewheel_lora_evictions_total", "Loads that evicted an adapter", "num_lora_evictions")
ENGINE_RESTARTS = _counter("tidewheel_engine_restarts_total", "Engines that took the place of a lost one")
STEP_TOKENS = Metric("engine", "histogram", "vllm:iteration_tokens_total", "Tokens of a step", "step_tokens")

# Counters of a tenant: fields of `stats.TenantFigures`.
TENANT_REQUESTS = _tenant("tidewheel_tenant_requests_total", "Requests, refused ones included", "num_requests")
TENANT_REJECTED = _tenant("tidewheel_tenant_requests_rejected_total", "Refused, or late before start", "num_rejected")
TENANT_STARTED = _tenant("tidewheel_tenant_requests_started_total", "Requests that started", "num_started")
TENANT_QUEUE_SECONDS = _tenant("tidewheel_tenant_queue_seconds_total", "Time from arrival to start", "queue_seconds")
TENANT_PROMPT_TOKENS = _tenant(
    "tidewheel_tenant_prompt_tokens_total", "Prompts of ended requests", "num_prompt_tokens"
)
TENANT_GENERATION_TOKENS = _tenant(
    "tidewheel_tenant_generation_tokens_total", "Generated tokens of ended requests", "num_output_tokens"
)
TENANT_OBJECTIVES = _tenant(
    "tidewheel_tenant_objectives_total", "Ended and refused requests with ttft_ms or tpot_ms", "num_objectives"
)
TENANT_OBJECTIVES_MET = _tenant(
    "tidewheel_tenant_objectives_met_total", "Of these, requests that met them", "num_objectives_met"
)

# Figures of a LoRA adapter: fields of `stats.LoraFigures`. Those used first have labels, `other` is the rest.
LORA_RUNNING = _lora_gauge("tidewheel_lora_requests_running", "Running requests of an adapter", "num_running")
LORA_WAITING = _lora_gauge("tidewheel_lora_requests_waiting", "Waiting requests of an adapter", "num_waiting")
LORA_REQUESTS = _lora("tidewheel_lora_requests_total", "Requests of an adapter", "num_requests")
LORA_PROMPT_TOKENS = _lora("tidewheel_lora_prompt_tokens_total", "Prompts of ended requests", "num_prompt_tokens")
LORA_GENERATION_TOKENS = _lora(
    "tidewheel_lora_generation_tokens_total", "Answers of ended requests", "num_output_tokens"
)

# Requests as the front end sees them: fields of `frontend.request_figures.FrontendStats`.
RECEIVED = _requests("tidewheel_requests_received_total", "Requests", "num_received")
FINISHED = _requests("vllm:request_success_total", "Finished requests", "finished", label="finished_reason")
REJECTED = _errors("tidewheel_requests_rejected_total", "Requests refused before anything was computed", "rejected")
FAILED = _errors("tidewheel_requests_failed_total", "Accepted requests that an error ended", "failed")
ANSWERED = _by_class("tidewheel_requests_answered_total", "Requests answered in full, of one QoS class", "answered")
IN_TIME = _by_class("tidewheel_requests_in_time_total", "Of these, requests within the objective: goodput", "in_time")
PROMPT_TOKENS = _requests("vllm:prompt_tokens_total", "Prompt tokens", "num_prompt_tokens")
GENERATION_TOKENS = _requests("vllm:generation_tokens_total", "Generated tokens", "num_generation_tokens")
TIME_TO_FIRST_TOKEN = _histogram("vllm:time_to_first_token_seconds", "Arrival to first token", "time_to_first_token")
E2E_LATENCY = _histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", "e2e_latency")
QUEUE_TIME = _histogram("vllm:request_queue_time_seconds", "Arrival to first step", "queue_time")
INFERENCE_TIME = _histogram("vllm:request_inference_time_seconds", "First step to last token", "inference_time")
PREFILL_TIME = _histogram("vllm:request_prefill_time_seconds", "First step to first token", "prefill_time")
DECODE_TIME = _histogram("vllm:request_decode_time_seconds", "First to last token", "decode_time")
REQUEST_PROMPT_TOKENS = _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", "prompt_tokens")
REQUEST_GENERATION_TOKENS = _histogram("vllm:request_generation_tokens", "Tokens of a sequence", "output_tokens")
REQUEST_SEQUENCES = _histogram("vllm:request_params_n", "Sequences of a request", "num_sequences")
REFUSAL_TIME = _histogram("tidewheel_refusal_seconds", "Arrival to refusal", "refusal_time")
INTER_TOKEN_LATENCY = _histogram("vllm:inter_token_latency_seconds", "Token to token", "inter_token_latency")
OLD_INTER_TOKEN_LATENCY = _histogram(
    "vllm:time_per_output_token_seconds", "The same, older name", "inter_token_latency"
)

GATEWAY_REQUESTS = _gateway_counter("tidewheel_gateway_requests_total", "answered requests", label="path and status")
GATEWAY_ERRORS = _gateway_counter("tidewheel_gateway_errors_total", "requests that ended with an error", label="tag")
GATEWAY_OPEN = Metric("gateway", "gauge", "tidewheel_gateway_open_requests", "requests without a whole answer")
GATEWAY_HANG_UPS = _gateway_counter("tidewheel_gateway_hang_ups_total", "requests whose client went away")
GATEWAY_MOVED = _gateway_counter("tidewheel_gateway_moved_total", "requests that went on to another server")
UPSTREAM_SENT = _gateway_counter(
    "tidewheel_gateway_upstream_requests_total", "requests sent to a server, moved ones too", label="upstream"
)
UPSTREAM_READY = _upstream_gauge("tidewheel_gateway_upstream_ready", "1 for a server that takes requests")
UPSTREAM_OPEN = _upstream_gauge("tidewheel_gateway_upstream_open_requests", "requests that a server works on")

SERVER_READY = _health_gauge("tidewheel_ready", "1 if /ready says 200, else 0")
SERVER_LIVE = _health_gauge("tidewheel_live", "1 if /live says 200, else 0")

TRITON_GPU_USE = _triton_gauge("nv_gpu_utilization", "Use of a GPU")
TRITON_CPU_USE = _triton_gauge("nv_cpu_utilization", "Use of the CPU")
TRITON_INFERENCES = _triton_counter("nv_inference_count", "Inferences")
TRITON_EXECUTIONS = _triton_counter("nv_inference_exec_count", "Executed batches")
TRITON_QUEUE_TIME = _triton_counter("nv_inference_queue_duration_us", "Time in Triton's queue")

TABLE: tuple[Metric, ...] = tuple(row for row in list(globals().values()) if isinstance(row, Metric))


def select(owner: Owner) -> list[Metric]:
    return [metric for metric in TABLE if metric.owner == owner and metric.source]
