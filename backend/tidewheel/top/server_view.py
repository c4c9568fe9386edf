"""Values that `tidewheel top` shows: the same for the terminal, `--once` and `--json`.

Rates are per second of the newest seconds. None is a figure that the server does not have, or not yet.
"""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, kw_only=True):
    server: str  # address of the metrics
    models: list[str]
    is_ready: bool | None  # None: /ready does not answer
    state: str
    reason: str
    summary: str = ""  # in a sentence
    traffic: Traffic
    classes: list[ClassLine]
    tenants: list[TenantLine]
    cache: CacheLine
    steps: StepLine
    errors: list[ErrorLine]
    gateway: GatewayLine | None = None
    gateway_problem: str = ""
    requests: list[RequestLine] = []  # the oldest
    num_sequences: int = 0  # unfinished, of all requests
    requests_note: str = ""  # why there are none to see


class Traffic(msgspec.Struct, kw_only=True):
    running: float | None
    waiting: float | None
    received_rate: float | None
    finished_rate: float | None
    refused_rate: float | None
    rate_limited_rate: float | None  # of those, refused by a tenant's own rates
    failed_rate: float | None
    prompt_tokens_rate: float | None
    output_tokens_rate: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    queue_p95_s: float | None
    in_time: float | None  # share of the answers


class ClassLine(msgspec.Struct, kw_only=True):
    name: str
    running: int | None  # of the requests that are listed
    waiting: float | None
    oldest_wait_s: float | None  # of those that wait
    longest_wait_s: float | None  # of those that started
    started_rate: float | None
    shed: float | None  # refused by the breaker
    evicted: float | None  # displaced by a better class
    in_time: float | None  # share of the answers


class TenantLine(msgspec.Struct, kw_only=True):
    name: str
    requests_rate: float | None
    rejected_rate: float | None
    mean_queue_s: float | None
    prompt_tokens_rate: float | None
    output_tokens_rate: float | None
    output_tokens: float | None


class CacheLine(msgspec.Struct, kw_only=True):
    use: float | None  # share of the blocks
    num_blocks: float | None
    cached_blocks: float | None
    hit_rate: float | None  # tokens found, of those that entered
    sessions: float | None
    session_blocks: float | None
    host_blocks: float | None
    host_blocks_free: float | None


class StepLine(msgspec.Struct, kw_only=True):
    rate: float | None
    tokens_rate: float | None  # computed
    tokens_per_step: float | None
    seconds_per_step: float | None
    busy: float | None  # share of the time
    token_budget: float | None
    max_num_seqs: float | None
    preemptions: float | None
    preemptions_rate: float | None
    restarts: float | None  # of the engine
    breaker: str  # empty: unknown


class ErrorLine(msgspec.Struct, kw_only=True):
    """Counts under the tag of `docs/errors.md`."""

    tag: str
    refused: float  # before anything was computed
    refused_rate: float | None
    failed: float  # afterwards
    failed_rate: float | None
    gateway: float  # errors that the gateway answered with, the server's among them


class GatewayLine(msgspec.Struct, kw_only=True):
    requests_rate: float | None
    open_requests: float | None
    hang_ups: float | None
    moved: float | None


class RequestLine(msgspec.Struct, kw_only=True):
    """Unfinished request. `engine` and `number` name it for a cancel."""

    engine: str  # folder of its engine
    engine_pid: int
    number: int
    request_id: str
    priority: str
    tenant: str
    state: str
    age_s: float
    waited_s: float
    first_token_s: float | None
    tokens_rate: float | None  # since the first token
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int
