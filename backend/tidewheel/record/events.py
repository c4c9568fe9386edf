"""Events of a recording: one JSON array a line, the event's name first.

A recording holds no text and no real token. Decisions depend on tokens in two ways only: which requests share a
prefix, and which token ends a request. So each token becomes a number drawn from the whole prefix that it ends
(`names.PrefixNames`), or 0 if it stops a request. Session, salt and tenant names are drawn likewise, except tenants
that the settings name.
"""

from __future__ import annotations

import msgspec

from tidewheel.errors import ConfigError

SCHEMA = 1
STOP_TOKEN = 0
ORDINARY_TOKEN = 1  # undelivered, or any other token without prefix caching


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class Header(Event, frozen=True, tag="tidewheel-recording"):
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


class Added(Event, frozen=True, tag="add"):
    now: float
    requests: list[RecordedRequest]  # a leader, then its followers
    refused: str  # error tag; empty: accepted
    evicted: list[str]


class Cancelled(Event, frozen=True, tag="cancel"):
    request_id: str
    reason: str
    was_there: bool


class Expired(Event, frozen=True, tag="expire"):
    now: float
    ended: list[str]


class Failed(Event, frozen=True, tag="fail-all"):
    ended: list[str]


class SessionClosed(Event, frozen=True, tag="close-session"):
    tenant: str
    session_id: str
    was_there: bool


class Scheduled(Event, frozen=True, tag="schedule"):
    now: float
    expired: bool  # `expire` ran just before, at `now`, and ended no request
    step_id: int = -1  # -1: nothing was scheduled
    num_rows: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    num_new_rows: int = 0
    kv_tokens: int = 0
    chunk_pairs: int = 0
    digest: str = ""
    new_requests: list[str] = []
    freed_rows: list[int] = []


class Applied(Event, frozen=True, tag="apply"):
    now: float
    step_id: int
    tokens: bytes  # int32 token names by row; empty: all ORDINARY_TOKEN
    num_delivered: int
    ended: list[tuple[str, str]]  # id, finish reason


class Full(Event, frozen=True, tag="full"):
    """Last event of a recording that reached its size limit."""


AnyEvent = Header | Added | Cancelled | Expired | Failed | SessionClosed | Scheduled | Applied | Full

encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def decode_line(line: bytes, number: int) -> AnyEvent:
    """Raise `ConfigError` naming the line."""
    try:
        event: AnyEvent = _decoder.decode(line)
        return event
    except msgspec.MsgspecError as error:
        raise ConfigError(f"line {number} of the recording cannot be read: {error}") from None
