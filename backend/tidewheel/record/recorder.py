import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import BinaryIO
from weakref import WeakKeyDictionary

import numpy as np

from tidewheel.batch import NO_DRAFT, SampledTokens, ScheduledBatch, StepOutputs, accepted
from tidewheel.errors import TidewheelError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.lora import Lora
from tidewheel.record import recorded_events as events
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.version import __version__

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 28
BUFFER_BYTES = 1 << 20
_STATE_BYTES = 16
_LARGEST_NAME = 2**31 - 1


class PrefixNames:
    """Hasher that replaces each token by 31 bits of the hash of the prompt up to it.

    The BLAKE2b chain (RFC 7693) starts from a secret that is never written, so prompts cannot be guessed.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.root = os.urandom(_STATE_BYTES) if secret is None else secret

    def extend(self, state: bytes, token_ids: Iterable[int]) -> tuple[bytes, list[int]]:
        """Return the hash state after the tokens, and each token's 31-bit name. A prompt starts at state `root`."""
        names = []
        for token_id in token_ids:
            state = blake2b(state + token_id.to_bytes(4, "little"), digest_size=_STATE_BYTES).digest()
            names.append(max(int.from_bytes(state[:4], "little") & _LARGEST_NAME, events.ORDINARY_TOKEN + 1))
        return state, names

    def word(self, text: str) -> str:
        if not text:
            return ""
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self.root, digest_size=8).hexdigest()


class Recorder:
    """Writer of a recording; the file is complete when the engine is idle. A write error ends only the recording."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        settings: dict[str, object],
        info: dict[str, object],
        with_contents: bool,
        named_tenants: Collection[str] = (),
    ) -> None:
        self._file: BinaryIO | None = file
        self.names = PrefixNames()
        self.with_contents = with_contents
        self._named_tenants = named_tenants
        self._num_bytes = 0
        self.write(events.HeaderEvent(events.SCHEMA, __version__, settings, info))

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def tenant(self, name: str) -> str:
        return name if name in self._named_tenants else self.names.word(name)

    def write(self, event: events.Event) -> None:
        if self._file is None:
            return
        try:
            self._num_bytes += self._file.write(events.encoder.encode(event) + b"\n")
            if self._num_bytes > MAX_BYTES:
                log.warning("recording ends: it has %d bytes, its limit", self._num_bytes)
                self._file.write(events.encoder.encode(events.FullEvent()) + b"\n")
                self._file.flush()
                self._file = None
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        log.warning("recording ends: %s", error)
        self._file = None


class RecordingScheduler(Scheduler):
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        recorder: Recorder,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(config, kv)
        self._recorder = recorder
        self._clock = clock
        self._prefixes: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()  # states of `PrefixNames`
        self._lora_events: WeakKeyDictionary[Lora, events.LoraEvent] = WeakKeyDictionary()  # last ones

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        if (lora := requests[0].lora) is not None:
            self._note_loras([lora])
        try:
            evicted = super().add_group(requests, now)
        except TidewheelError as error:
            self._added(requests, now, error.tag, ())
            raise
        self._added(requests, now, "", evicted)
        return evicted

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, error: TidewheelError | None = None
    ) -> Request | None:
        request = super().cancel(request_id, reason, error)
        self._recorder.write(events.CancelEvent(request_id, str(reason), request is not None))
        return request

    def expire(self, now: float) -> list[Request]:
        self._note_loras(self.loras.waiting)
        ended = super().expire(now)
        if ended:
            self._recorder.write(events.ExpireEvent(now, _ids(ended)))
        return ended

    def fail_all(self, error: TidewheelError) -> list[Request]:
        ended = super().fail_all(error)
        self._recorder.write(events.FailEvent(_ids(ended)))
        self._recorder.flush()
        return ended

    def close_session(self, tenant: str, session_id: str) -> None:
        was_there = False
        try:
            super().close_session(tenant, session_id)
            was_there = True
        finally:
            named = self._recorder.tenant(tenant), self._recorder.names.word(session_id)
            self._recorder.write(events.SessionCloseEvent(*named, was_there))

    def pause_session(self, tenant: str, session_id: str, tools: Sequence[str], now: float) -> None:
        super().pause_session(tenant, session_id, tools, now)
        word = self._recorder.names.word
        named = self._recorder.tenant(tenant), word(session_id), list(map(word, tools))
        self._recorder.write(events.SessionPauseEvent(now, *named))

    def schedule(self, now: float, slice_s: float | None = None) -> ScheduledBatch | None:
        begin = self._clock()
        batch = super().schedule(now, slice_s)
        seconds = self._clock() - begin
        self._note_loras(self.loras.waiting)  # their weights may have been dropped for those of others
        if batch is None:
            waits = self.loras.now != now  # nothing was planned
            self._recorder.write(events.ScheduleEvent(now, slice_s=slice_s, waits=waits))
            self._recorder.flush()
        elif self._recorder.is_open:
            self._recorder.write(describe_batch(now, batch, seconds, slice_s))
        return batch

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        requests = self._state.columns.requests(batch.rows.astype(np.intp))
        begin = self._clock()
        outputs = super().apply(batch, sampled, now)
        seconds = self._clock() - begin
        if self._recorder.is_open:
            names = self._token_names(requests, batch, sampled, set(outputs.requests))
            ended, num_delivered = describe_ended(outputs), len(outputs.token_ids)
            self._recorder.write(
                events.ApplyEvent(now, sampled.step_id, names, num_delivered, ended, seconds, sampled.launch)
            )
            if not self.has_unfinished:
                self._recorder.flush()
        return outputs

    def _note_loras(self, loras: Iterable[Lora]) -> None:
        for lora in loras:
            error = "" if lora.error is None else lora.error.tag
            event = events.LoraEvent(self._lora_name(lora), lora.weights is not None, error)
            if event != self._lora_events.get(lora):
                self._recorder.write(event)
                self._lora_events[lora] = event

    def _lora_name(self, lora: Lora | None) -> str:
        return "" if lora is None else f"{self._recorder.tenant(lora.name)}:{lora.version}"

    def _added(self, requests: Sequence[Request], now: float, refused: str, evicted: Sequence[Request]) -> None:
        if self._recorder.is_open:
            recorded = [self._recorded(request, with_contents=not refused) for request in requests]
            self._recorder.write(events.AddEvent(now, recorded, refused, _ids(evicted)))

    def _recorded(self, request: Request, *, with_contents: bool) -> events.RecordedRequest:
        names = self._recorder.names
        state, prompt = names.root, b""
        if self._recorder.with_contents and with_contents:
            state, ids = names.extend(state, request.prompt_token_ids.tolist())
            prompt = np.array(ids, dtype="<i4").tobytes()
        self._prefixes[request] = state
        return events.RecordedRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt=prompt,
            max_tokens=request.max_tokens,
            min_tokens=request.sampling.min_tokens,
            can_stop=bool(request.stop_token_ids),
            arrival_time=request.arrival_time,
            priority=int(request.priority),
            cache_salt=names.word(request.cache_salt),
            tenant=self._recorder.tenant(request.tenant),
            deadline=request.deadline,
            soft_deadline=request.soft_deadline,
            session_id=names.word(request.session_id),
            session_ttl=request.session_ttl,
            bucket=request.bucket,
            encoder_tokens=request.encoder_tokens,
            objective=request.objective,
            lora=self._lora_name(request.lora),
        )

    def _token_names(
        self, requests: list[Request], batch: ScheduledBatch, sampled: SampledTokens, delivered: set[Request]
    ) -> bytes:
        token_ids = sampled.token_ids
        if len(drafts := batch.draft_tokens if sampled.draft_tokens is None else sampled.draft_tokens):
            token_ids = np.where(accepted(drafts, token_ids), token_ids, SampledTokens.NOT_SAMPLED)
        names = [
            self._token_name(request, token_id) if request in delivered or token_id < 0 else events.ORDINARY_TOKEN
            for request, token_id in zip(requests, token_ids.tolist(), strict=True)
        ]
        if all(name == events.ORDINARY_TOKEN for name in names):
            return b""
        return np.array(names, dtype="<i4").tobytes()

    def _token_name(self, request: Request, token_id: int) -> int:
        if token_id < 0:
            return token_id
        if token_id in request.stop_token_ids:
            return events.STOP_TOKEN
        if not self._recorder.with_contents:
            return events.ORDINARY_TOKEN
        self._prefixes[request], (name,) = self._recorder.names.extend(self._prefixes[request], (token_id,))
        return name


def describe_batch(now: float, batch: ScheduledBatch, seconds: float, slice_s: float | None) -> events.ScheduleEvent:
    firsts = (batch.draft_tokens == NO_DRAFT).nonzero()[0]
    return events.ScheduleEvent(
        now,
        batch.step_id,
        events.step_features(batch),
        digest=batch_digest(batch),
        new_requests=[new.request.request_id for new in batch.new_rows],
        freed_rows=batch.freed_rows.tolist(),
        seconds=seconds,
        weights=batch.weights,
        slice_s=slice_s,
        drafts=(np.diff(firsts, append=len(batch.draft_tokens)) - 1).tolist(),
    )


def batch_digest(batch: ScheduledBatch) -> str:
    digest = blake2b(digest_size=8)
    columns = _COLUMNS if len(batch.lora_slots) else _BASE_COLUMNS
    for column in (*(getattr(batch, name) for name in columns), *batch.transfers):
        digest.update(len(column).to_bytes(4, "little"))
        digest.update(column.tobytes())
    for new in batch.new_rows:
        digest.update(
            f"{new.row} {new.request.request_id} {len(new.token_ids)} {new.request.num_prompt_tokens}\n".encode()
        )
    return digest.hexdigest()


def describe_ended(outputs: StepOutputs) -> list[tuple[str, str]]:
    return [(request.request_id, str(request.finish_reason)) for request in outputs.finished]


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


_COLUMNS = tuple(
    name
    for name, hint in ScheduledBatch.__annotations__.items()
    if hint in ("Int32Array", "BoolArray") and name != "draft_tokens"  # contents are not recorded
)
_BASE_COLUMNS = tuple(name for name in _COLUMNS if name != "lora_slots")
