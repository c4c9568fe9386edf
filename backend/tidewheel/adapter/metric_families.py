"""Families of metrics on `/metrics`, with vLLM's names where they exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from tidewheel.frontend.request_figures import FrontendStats
from tidewheel.request import Priority
from tidewheel.stats import EngineStats, Histogram, TenantFigures

Labels = Mapping[str, str]


T = TypeVar("T")


class Figure(NamedTuple, Generic[T]):
    name: str
    description: str
    of: Callable[[T], float]
    labels: Labels = MappingProxyType({})  # beside the model's


class HistogramFigure(NamedTuple):
    name: str
    description: str
    of: Callable[[FrontendStats], Histogram]


class Family(NamedTuple):
    name: str
    description: str


def _usage(stats: EngineStats) -> float:
    return 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


def _fragmentation(stats: EngineStats) -> float:
    return 1.0 - stats.num_used_slots / stats.num_taken_slots if stats.num_taken_slots else 0.0


def _by_class(
    name: str, description: str, of: Callable[[EngineStats], Sequence[float]]
) -> tuple[Figure[EngineStats], ...]:
    def element(index: int) -> Callable[[EngineStats], float]:
        return lambda stats: of(stats)[index]

    return tuple(
        Figure(name, description, element(index), {"class": priority.name.lower()})
        for index, priority in enumerate(Priority)
    )


BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}
_DOWNGRADED = "tidewheel_requests_downgraded_total", "Requests that dropped a class"
_SWAPPED = "tidewheel_kv_blocks_swapped_total", "Blocks copied between device and host tier"
_HITS = "tidewheel_kv_hit_tokens_total", "Tokens of requests that entered the running set and were found in the cache"

ENGINE_GAUGES: tuple[Figure[EngineStats], ...] = (
    Figure("vllm:num_requests_running", "Requests in the running set", lambda s: s.num_running),
    Figure("vllm:num_requests_waiting", "Requests that wait to be scheduled", lambda s: s.num_waiting),
    Figure("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it", _usage),
    Figure("vllm:gpu_cache_usage_perc", "The same, by its older name", _usage),
    Figure("tidewheel_waiting_tokens", "Prompt tokens of waiting requests", lambda s: s.num_waiting_tokens),
    *_by_class("tidewheel_requests_waiting", "Waiting requests of one QoS class", lambda s: s.waiting_by_class),
    *_by_class("tidewheel_wait_max_seconds", "Longest wait of a request that started", lambda s: s.max_wait_by_class),
    *_by_class("tidewheel_wait_oldest_seconds", "Age of the oldest waiting one", lambda s: s.oldest_wait_by_class),
    Figure("tidewheel_kv_blocks_cached", "Free blocks with content to reuse", lambda s: s.num_cached_blocks),
    Figure("tidewheel_kv_fragmentation", "Share of the slots in taken blocks without a token", _fragmentation),
    Figure("tidewheel_kv_slots_wasted", "Slots behind the last token of a row", lambda s: s.num_wasted_slots),
    Figure("tidewheel_kv_host_blocks", "Blocks of the host tier", lambda s: s.num_host_blocks),
    Figure("tidewheel_kv_host_blocks_free", "Empty or evictable host blocks", lambda s: s.num_free_host_blocks),
    Figure("tidewheel_sessions", "Sessions that are kept", lambda s: s.num_sessions),
    Figure("tidewheel_session_blocks", "Blocks that sessions alone hold", lambda s: s.num_session_blocks),
    Figure("tidewheel_engine_busy_fraction", "Step time over wall time", lambda s: s.busy_fraction),
    Figure("tidewheel_token_budget", "Tokens that a step may compute now", lambda s: s.token_budget),
    Figure("tidewheel_max_num_seqs", "Requests that may run now", lambda s: s.max_num_seqs),
    Figure("tidewheel_breaker_state", "0 closed, 1 half open, 2 open", lambda s: BREAKER_STATES[s.breaker_state]),
    Figure("tidewheel_prediction_error_tokens", "Smoothed error of predicted lengths", lambda s: s.prediction_error),
)
ENGINE_COUNTERS: tuple[Figure[EngineStats], ...] = (
    Figure("vllm:prefix_cache_queries_total", "Prompt tokens looked up", lambda s: s.num_prefix_queries),
    Figure("vllm:prefix_cache_hits_total", "Prompt tokens found", lambda s: s.num_prefix_hits),
    Figure("vllm:num_preemptions_total", "Preemptions", lambda s: s.num_preemptions),
    Figure("tidewheel_swap_preemptions_total", "Preemptions into the host tier", lambda s: s.num_swap_preemptions),
    Figure("tidewheel_steps_total", "Steps", lambda s: s.num_steps),
    Figure("tidewheel_step_seconds_total", "Time in steps", lambda s: s.step_seconds),
    Figure("tidewheel_scheduled_tokens_total", "Tokens computed", lambda s: s.num_scheduled_tokens),
    *_by_class("tidewheel_requests_started_total", "Requests that started", lambda s: s.started_by_class),
    *_by_class("tidewheel_requests_evicted_total", "Requests displaced by newcomers", lambda s: s.evicted_by_class),
    *_by_class("tidewheel_requests_shed_total", "Requests refused by the breaker", lambda s: s.num_shed_by_class),
    Figure("tidewheel_requests_rate_limited_total", "Requests over a tenant's rates", lambda s: s.num_rate_limited),
    Figure("tidewheel_requests_expired_total", "Requests whose deadline passed", lambda s: s.num_expired),
    Figure("tidewheel_requests_hopeless_total", "Requests whose deadline could not be met", lambda s: s.num_hopeless),
    Figure("tidewheel_requests_aged_total", "Lifts of waiting requests by one class", lambda s: s.num_aged),
    Figure(*_DOWNGRADED, lambda s: s.num_downgraded_quota, {"reason": "quota"}),
    Figure(*_DOWNGRADED, lambda s: s.num_downgraded_deadline, {"reason": "deadline"}),
    Figure("tidewheel_predictions_total", "Ended requests with a predicted length", lambda s: s.num_predictions),
    Figure(*_SWAPPED, lambda s: s.num_swapped_out, {"direction": "out"}),
    Figure(*_SWAPPED, lambda s: s.num_swapped_in, {"direction": "in"}),
    Figure(
        "tidewheel_kv_queried_tokens_total",
        "Tokens of requests that entered the running set",
        lambda s: s.num_hit_queries,
    ),
    Figure(*_HITS, lambda s: s.num_device_hits, {"tier": "device"}),
    Figure(*_HITS, lambda s: s.num_host_hits, {"tier": "host"}),
    Figure("tidewheel_session_hit_tokens_total", "Tokens found in a session", lambda s: s.num_session_hits),
)
TENANT_COUNTERS: tuple[Figure[TenantFigures], ...] = (
    Figure("tidewheel_tenant_requests_total", "Requests, refused ones included", lambda t: t.num_requests),
    Figure(
        "tidewheel_tenant_requests_rejected_total", "Requests refused or late before start", lambda t: t.num_rejected
    ),
    Figure("tidewheel_tenant_requests_started_total", "Requests that started", lambda t: t.num_started),
    Figure("tidewheel_tenant_queue_seconds_total", "Time from arrival to start", lambda t: t.queue_seconds),
    Figure("tidewheel_tenant_prompt_tokens_total", "Prompt tokens of ended requests", lambda t: t.num_prompt_tokens),
    Figure(
        "tidewheel_tenant_generation_tokens_total",
        "Generated tokens of ended requests",
        lambda t: t.num_output_tokens,
    ),
)
CACHE_BLOCKS = Family("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks")  # Triton makes load headers of it
CACHE_CONFIG = Family("vllm:cache_config_info", "1; its labels are the size of the KV cache")
ENGINE_READY = Family("tidewheel_engine_ready", "1 if the engine takes requests, 0 if it does not")
ENGINE_RESTARTS = Family("tidewheel_engine_restarts_total", "Engines that took the place of a lost one")
STEP_TOKENS = Family("vllm:iteration_tokens_total", "Tokens of a step")

RECEIVED = Family("tidewheel_requests_received_total", "Requests")
FINISHED = Family("vllm:request_success_total", "Finished requests")
REJECTED = Family("tidewheel_requests_rejected_total", "Requests refused before anything was computed")
FAILED = Family("tidewheel_requests_failed_total", "Accepted requests that an error ended")
ANSWERED = Family("tidewheel_requests_answered_total", "Requests answered in full, of one QoS class")
IN_TIME = Family("tidewheel_requests_in_time_total", "Of these, requests within the objective: goodput")
PROMPT_TOKENS = Family("vllm:prompt_tokens_total", "Prompt tokens")
GENERATION_TOKENS = Family("vllm:generation_tokens_total", "Generated tokens")
REQUEST_HISTOGRAMS = (
    HistogramFigure("vllm:time_to_first_token_seconds", "Arrival to first token", lambda s: s.time_to_first_token),
    HistogramFigure("vllm:e2e_request_latency_seconds", "Arrival to last token", lambda s: s.e2e_latency),
    HistogramFigure("vllm:request_queue_time_seconds", "Arrival to first step", lambda s: s.queue_time),
    HistogramFigure("vllm:request_inference_time_seconds", "First step to last token", lambda s: s.inference_time),
    HistogramFigure("vllm:request_prefill_time_seconds", "First step to first token", lambda s: s.prefill_time),
    HistogramFigure("vllm:request_decode_time_seconds", "First to last token", lambda s: s.decode_time),
    HistogramFigure("vllm:request_prompt_tokens", "Prompt tokens of a request", lambda s: s.prompt_tokens),
    HistogramFigure("vllm:request_generation_tokens", "Generated tokens of a sequence", lambda s: s.output_tokens),
    HistogramFigure("vllm:request_params_n", "Sequences of a request", lambda s: s.num_sequences),
    HistogramFigure("tidewheel_refusal_seconds", "Arrival to refusal", lambda s: s.refusal_time),
)
TOKEN_HISTOGRAMS = (
    HistogramFigure("vllm:inter_token_latency_seconds", "Token to token", lambda s: s.inter_token_latency),
    HistogramFigure(
        "vllm:time_per_output_token_seconds", "Token to token, older name", lambda s: s.inter_token_latency
    ),
)
