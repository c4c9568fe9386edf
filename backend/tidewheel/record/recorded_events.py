"""Events of a recording: one JSON array a line, the event's name first.

A token is a hash of the prefix that it ends, or 0 if it stops a request: scheduling needs no more. Names of sessions,
salts, adapters and tenants are hashed, except tenants and adapters with limits in the settings.
"""

from typing import NamedTuple

import msgspec

from tidewheel.batch import Launch, ScheduledBatch, WeightVariant

SCHEMA = 2
STOP_TOKEN = 0
ORDINARY_TOKEN = 1  # not delivered, or without prefix caching


class StepFeatures(NamedTuple):
    num_rows: int
    num_tokens: int
    num_samples: int
    num_new_rows: int
    kv_tokens: int  # cached tokens that attention reads
    chunk_pairs: int  # (query, key) pairs of chunks over one token
    encoder_tokens: int = 0  # of requests that enter with audio
    shape: str = ""  # bucket of requests without text


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class HeaderEvent(Event, frozen=True, tag="tidewheel-recording"):
    schema: int
    version: str
    settings: dict[str, object]  # `EngineConfig.to_settings`
    info: dict[str, object]  # `EngineInfo`


class RecordedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: str
    num_prompt_tokens: int
    prompt: bytes  # int32 token names; empty without prefix caching
    max_tokens: int
    min_tokens: int
    can_stop: bool
    arrival_time: float
    priority: int
    cache_salt: str
    tenant: str
    deadline: float | None
    soft_deadline: float | None
    session_id: str
    session_ttl: float
    bucket: str = ""
    encoder_tokens: int = 0
    objective: tuple[float | None, float | None, bool] | None = None  # `RequestObjective`; null: infinite
    lora: str = ""  # name and version


class AddEvent(Event, frozen=True, tag="add"):
    now: float
    requests: list[RecordedRequest]  # a leader, then its followers
    refused: str  # error tag; empty: accepted
    evicted: list[str]


class LoraEvent(Event, frozen=True, tag="lora"):
    """Change of an adapter that requests wait for: it has weights or none, or cannot be read."""

    lora: str
    has_weights: bool
    error: str  # tag; empty: none


class CancelEvent(Event, frozen=True, tag="cancel"):
    request_id: str
    reason: str
    was_there: bool


class ExpireEvent(Event, frozen=True, tag="expire"):
    """Call of `expire` that ended requests."""

    now: float
    ended: list[str]


class FailEvent(Event, frozen=True, tag="fail-all"):
    ended: list[str]


class SessionCloseEvent(Event, frozen=True, tag="close-session"):
    tenant: str
    session_id: str
    was_there: bool


class SessionPauseEvent(Event, frozen=True, tag="pause-session"):
    now: float
    tenant: str
    session_id: str
    tools: list[str]


class ScheduleEvent(Event, frozen=True, tag="schedule"):
    """Call of `schedule`, right after a call of `expire`."""

    now: float
    step_id: int = -1  # -1: nothing was scheduled
    features: StepFeatures = StepFeatures(0, 0, 0, 0, 0, 0)
    digest: str = ""
    new_requests: list[str] = []
    freed_rows: list[int] = []
    seconds: float = 0.0  # that planning took; 0: not measured
    weights: WeightVariant = "full"
    slice_s: float | None = None  # longest time of the step; None: no limit
    drafts: list[int] = []  # of each row that decodes; empty: the step has none
    waits: bool = False  # for tokens that drafts may follow


class ApplyEvent(Event, frozen=True, tag="apply"):
    now: float
    step_id: int
    tokens: bytes  # int32 token names, NOT_SAMPLED where a draft is rejected; empty: all ORDINARY_TOKEN
    num_delivered: int
    ended: list[tuple[str, str]]  # id, finish reason
    seconds: float = 0.0  # that applying took; 0: not measured
    launch: Launch = "eager"


class FullEvent(Event, frozen=True, tag="full"):
    """Last event of a recording that reached its size limit."""


AnyEvent = (
    HeaderEvent
    | AddEvent
    | LoraEvent
    | CancelEvent
    | ExpireEvent
    | FailEvent
    | SessionCloseEvent
    | SessionPauseEvent
    | ScheduleEvent
    | ApplyEvent
    | FullEvent
)


def step_features(batch: ScheduledBatch) -> StepFeatures:
    num_decodes, num_rows = batch.num_decodes, len(batch.rows)
    kv_tokens = int(batch.start_positions.sum()) + batch.num_tokens
    num_samples, chunk_pairs = num_decodes, 0
    if num_decodes < num_rows:
        num_samples += int(batch.samples[num_decodes:].sum())
        starts = batch.start_positions[num_decodes:].tolist()
        counts = batch.num_scheduled_tokens[num_decodes:].tolist()
        chunk_pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True))
    encoded = sum([new.request.encoder_tokens for new in batch.new_rows])
    counts_of_rows = num_rows, batch.num_tokens, num_samples, len(batch.new_rows)
    return StepFeatures(*counts_of_rows, kv_tokens, chunk_pairs, encoded, batch.bucket)


encoder = msgspec.json.Encoder()
decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
