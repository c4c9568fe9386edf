from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.batch import (
    NO_DRAFT,
    NOT_DRAFTED,
    Int32Array,
    RowArray,
    SampledTokens,
    ScheduledBatch,
    StepOutputs,
)
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import BY_TAG, ConfigError, EngineDead, InternalError, NotFound, TidewheelError
from tidewheel.lora import Lora
from tidewheel.record import recorded_events as record
from tidewheel.record.recorder import describe_batch, describe_ended
from tidewheel.request import FinishReason, Priority, Request, RequestObjective
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.goodput import Goodput
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.speculation import RunnerDrafts


class ReplayResult(NamedTuple):
    num_events: int
    num_steps: int
    num_requests: int
    difference: str  # the first; empty: none
    is_cut: bool  # engine killed or limit reached


class Recording:
    """Recorded calls of a scheduler, read from a file. Raise `ConfigError` naming the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_cut = False
        header = next(self._events(), None)
        if not isinstance(header, record.HeaderEvent):
            raise ConfigError(f"{path} is no recording: its first line is not the header of one")
        if header.schema != record.SCHEMA:
            raise ConfigError(f"{path} has schema {header.schema}: this version reads {record.SCHEMA}")
        self.header = header

    def events(self) -> Iterator[record.AnyEvent]:
        events = self._events()
        next(events)
        for event in events:
            if isinstance(event, record.FullEvent):
                self.is_cut = True
                return
            yield event

    def _events(self) -> Iterator[record.AnyEvent]:
        number = 0
        try:
            with self._path.open("rb") as file:
                for line in file:
                    number += 1
                    if not line.endswith(b"\n"):
                        self.is_cut = True
                        return
                    yield record.decoder.decode(line)
        except OSError as error:
            raise ConfigError(f"cannot read the recording {self._path}: {error}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path}: line {number} of the recording cannot be read: {error}") from None


def engine_of(header: record.HeaderEvent) -> tuple[EngineConfig, EngineInfo]:
    """Return settings and properties of the recorded engine. Raise `ConfigError` for another version's recording."""
    try:
        info = msgspec.convert(header.info, EngineInfo)
        return EngineConfig.from_settings(header.settings | {"record": ""}), info
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"the recording is of version {header.version}, and this one cannot read it: {error}"
        ) from None


def scheduler_of(header: record.HeaderEvent) -> Scheduler:
    return build_scheduler(*engine_of(header))


def replay(recording: Recording, scheduler: Scheduler) -> ReplayResult:
    return play(recording, EventPlayer(scheduler))


def play(recording: Recording, player: "EventPlayer") -> ReplayResult:
    num_events, difference = 0, ""
    for num_events, event in enumerate(recording.events(), 1):
        if found := player.play(event):
            difference = f"event {num_events}: {found}"
            break
    return ReplayResult(num_events, player.num_steps, player.num_requests, difference, recording.is_cut)


class RecordedLengths(Goodput):
    """Numbers of drafts as recorded: what they were is unknown, and with it how many would pay."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.planned = record.ScheduleEvent(0.0)

    def is_look_due(self, num_steps: int, num_vain_looks: int) -> bool:  # noqa: ARG002
        return True

    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:  # noqa: ARG002
        planned = np.array(self.planned.drafts, dtype=np.int32)
        return planned if len(planned) == len(rows) else np.full(len(rows), self.planned.waits, dtype=np.int32)

    def enter(self, *_: object) -> None: ...

    def observe_drafts(self, *_: object) -> None: ...

    def observe_step(self, *_: object) -> None: ...


class EventPlayer:
    """Player of recorded scheduler calls, which compares results with the recording."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_steps = 0
        self.num_requests = 0
        self.scheduler = scheduler
        self._lengths = RecordedLengths()
        if scheduler.max_drafts:
            scheduler.use_proposer(RunnerDrafts(scheduler.max_drafts), self._lengths)
        self._in_flight: deque[ScheduledBatch] = deque()
        self._loras: dict[str, Lora] = {}

    def play(self, event: record.AnyEvent) -> str:
        match event:
            case record.AddEvent():
                return self._add(event)
            case record.LoraEvent():
                lora = self._lora(event.lora)
                lora.weights = event.has_weights or None
                lora.error = BY_TAG[event.error]("replayed") if event.error else None
                return ""
            case record.CancelEvent():
                request = self.scheduler.cancel(event.request_id, FinishReason(event.reason))
                return _differs(f"cancel of {event.request_id}, was it there", event.was_there, request is not None)
            case record.ExpireEvent():
                ended = _ids(self.scheduler.expire(event.now))
                return _differs("requests whose deadline passed", event.ended, ended)
            case record.FailEvent():
                self._in_flight.clear()
                return _differs("requests that fail", event.ended, _ids(self.scheduler.fail_all(_FAILURE)))
            case record.SessionCloseEvent():
                return self._close_session(event)
            case record.SessionPauseEvent():
                self.scheduler.pause_session(event.tenant, event.session_id, event.tools, event.now)
                return ""
            case record.ScheduleEvent():
                return self._schedule(event)
            case record.ApplyEvent():
                return self._apply(event)
            case _:
                return f"a second {type(event).__name__}"

    def on_added(self, event: record.AddEvent, requests: list[Request]) -> None: ...

    def on_scheduled(self, event: record.ScheduleEvent, batch: ScheduledBatch) -> None: ...

    def on_applied(self, event: record.ApplyEvent, outputs: StepOutputs) -> None: ...

    def _add(self, event: record.AddEvent) -> str:
        requests = [to_request(recorded) for recorded in event.requests]
        for follower in requests[1:]:
            follower.leader = requests[0]
        for request, recorded in zip(requests, event.requests, strict=True):
            request.lora = self._lora(recorded.lora) if recorded.lora else None
        self.num_requests += len(requests)
        refused, evicted = "", list[str]()
        try:
            evicted = _ids(self.scheduler.add_group(requests, event.now))
        except TidewheelError as error:
            refused = error.tag
        self.on_added(event, requests)
        name = requests[0].request_id
        return _differs(f"refusal of {name}", event.refused, refused) or _differs(
            f"requests evicted for {name}", event.evicted, evicted
        )

    def _lora(self, name: str) -> Lora:
        return self._loras.setdefault(name, Lora(name.rpartition(":")[0], len(self._loras), Path()))

    def _close_session(self, event: record.SessionCloseEvent) -> str:
        was_there = True
        try:
            self.scheduler.close_session(event.tenant, event.session_id)
        except NotFound:
            was_there = False
        return _differs("close of a session, was it there", event.was_there, was_there)

    def _schedule(self, event: record.ScheduleEvent) -> str:
        if difference := self.play(record.ExpireEvent(event.now, [])):
            return difference
        self._lengths.planned = event
        batch = self.scheduler.schedule(event.now, event.slice_s)
        if batch is None:
            return _differs("scheduled step", event.step_id, -1)
        self._in_flight.append(batch)
        self.num_steps += 1
        self.on_scheduled(event, batch)
        decision = describe_batch(event.now, batch, event.seconds, event.slice_s)
        differences = (
            _differs(f"step {event.step_id}, {name}", getattr(event, name), getattr(decision, name))
            for name in (*_COMPARED_FIRST, *decision.__struct_fields__)
        )
        return next(filter(None, differences), "")

    def _apply(self, event: record.ApplyEvent) -> str:
        if not self._in_flight:
            return f"tokens of step {event.step_id}, which is not in flight"
        batch = self._in_flight.popleft()
        sampled = _sampled(batch, _tokens(event.tokens, len(batch.rows)))
        try:
            outputs = self.scheduler.apply(batch, sampled, event.now)
        except InternalError as error:
            return f"step {event.step_id} cannot be applied: {error}"
        self.on_applied(event, outputs)
        return _differs(
            f"step {event.step_id}, tokens delivered", event.num_delivered, len(outputs.token_ids)
        ) or _differs(f"step {event.step_id}, requests that end", event.ended, describe_ended(outputs))


_COMPARED_FIRST = ("step_id", "new_requests", "freed_rows", "features")
_FAILURE = EngineDead("replayed")


def to_request(recorded: record.RecordedRequest) -> Request:
    return Request(
        recorded.request_id,
        _tokens(recorded.prompt, recorded.num_prompt_tokens),
        SamplingParams(min_tokens=recorded.min_tokens),
        max_tokens=recorded.max_tokens,
        arrival_time=recorded.arrival_time,
        priority=Priority(recorded.priority),
        stop_token_ids=(record.STOP_TOKEN,) if recorded.can_stop else (),
        cache_salt=recorded.cache_salt,
        tenant=recorded.tenant,
        deadline=recorded.deadline,
        soft_deadline=recorded.soft_deadline,
        session_id=recorded.session_id,
        session_ttl=recorded.session_ttl,
        bucket=recorded.bucket,
        encoder_tokens=recorded.encoder_tokens,
        objective=None if recorded.objective is None else RequestObjective.of(*recorded.objective),
    )


def _sampled(batch: ScheduledBatch, tokens: Int32Array) -> SampledTokens:
    """Return a step's tokens, with drafts that are accepted as recorded."""
    if not len(batch.draft_tokens):
        return SampledTokens(batch.step_id, tokens)
    is_rejected = tokens == SampledTokens.NOT_SAMPLED
    drafts = np.where(is_rejected, NOT_DRAFTED, np.roll(tokens, 1))
    drafts[batch.draft_tokens == NO_DRAFT] = NO_DRAFT
    tokens = np.where(is_rejected, record.ORDINARY_TOKEN, tokens)
    return SampledTokens(batch.step_id, tokens, draft_tokens=drafts)


def _tokens(names: bytes, count: int) -> Int32Array:
    if not names:
        return np.full(count, record.ORDINARY_TOKEN, dtype=np.int32)
    return np.frombuffer(names, dtype="<i4").astype(np.int32)


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def _differs(what: str, recorded: object, replayed: object) -> str:
    return "" if recorded == replayed else f"{what}: recorded {recorded!r}, replayed {replayed!r}"
