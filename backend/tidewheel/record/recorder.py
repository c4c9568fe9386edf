"""Recorder of a scheduler's calls and decisions."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO

import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.record.recorded_events import (
    ORDINARY_TOKEN,
    SCHEMA,
    STOP_TOKEN,
    Added,
    Applied,
    Cancelled,
    Event,
    Expired,
    Failed,
    Full,
    Header,
    RecordedRequest,
    Scheduled,
    SessionClosed,
    encoder,
    step_features,
)
from tidewheel.request import Request
from tidewheel.version import __version__

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 28
FLUSH_BYTES = 1 << 20
_STATE_BYTES = 16
_LARGEST_NAME = 2**31 - 1


class PrefixNames:
    """Names of tokens: 31 of the 128 bits of a hash of the whole prefix that the token ends.

    BLAKE2b (RFC 7693) is chained from a random secret that is never written, so guesses at a prompt cannot be tested.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.root = os.urandom(_STATE_BYTES) if secret is None else secret

    def extend(self, state: bytes, token_ids: Iterable[int]) -> tuple[bytes, list[int]]:
        """Return the state after these tokens, and their names; `root` is the state of no token."""
        names = []
        for token_id in token_ids:
            state = blake2b(state + token_id.to_bytes(4, "little"), digest_size=_STATE_BYTES).digest()
            names.append(max(int.from_bytes(state[:4], "little") & _LARGEST_NAME, ORDINARY_TOKEN + 1))
        return state, names

    def word(self, text: str) -> str:
        """Return a name for a word; the empty one stays empty."""
        if not text:
            return ""
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self.root, digest_size=8).hexdigest()


@dataclass(slots=True)
class _Stream:
    request_id: str
    state: bytes
    stop_token_ids: Collection[int]


class Recorder:
    """Recording in a file, complete when the engine is idle; a write error ends only the recording."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        settings: dict[str, object],
        info: dict[str, object],
        with_contents: bool,
        named_tenants: Collection[str] = (),
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Name tokens only `with_contents`: with prefix caching, decisions depend on them."""
        self._file: BinaryIO | None = file
        self._names = PrefixNames()
        self._with_contents = with_contents
        self._named_tenants = named_tenants
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._unwritten: list[bytes] = []
        self._num_unwritten = 0
        self._streams: dict[str, _Stream] = {}
        self._rows: dict[int, _Stream] = {}
        self._in_flight: deque[list[_Stream]] = deque()
        self._pending_expire: float | None = None  # an `expire` that ended no request
        self._write(Header(SCHEMA, __version__, settings, info))

    def added(self, now: float, requests: Sequence[Request], refused: str, evicted: Sequence[Request]) -> None:
        recorded = [self._recorded(request, with_contents=not refused) for request in requests]
        self._write(Added(now, recorded, refused, self._ended(evicted)))
        if refused:
            self._ended(requests)

    def cancelled(self, request_id: str, reason: str, *, was_there: bool) -> None:
        self._streams.pop(request_id, None)
        self._write(Cancelled(request_id, reason, was_there))

    def expired(self, now: float, ended: Sequence[Request]) -> None:
        if ended:
            self._write(Expired(now, self._ended(ended)))
        else:
            self._pending_expire = now

    def failed(self, ended: Sequence[Request]) -> None:
        self._in_flight.clear()
        self._write(Failed(self._ended(ended)))
        self.flush()

    def session_closed(self, tenant: str, session_id: str, *, was_there: bool) -> None:
        self._write(SessionClosed(self._tenant(tenant), self._names.word(session_id), was_there))

    def scheduled(self, now: float, batch: ScheduledBatch | None, seconds: float = 0.0) -> None:
        expired, self._pending_expire = self._pending_expire == now, None
        if batch is None:
            self._write(Scheduled(now, expired))
            self.flush()
            return
        for new in batch.new_rows:
            self._rows[new.row] = self._streams[new.request_id]
        rows = self._rows
        self._in_flight.append([rows[row] for row in batch.rows.tolist()])
        self._write(describe_batch(now, batch, expired=expired, seconds=seconds))

    def applied(self, now: float, sampled: SampledTokens, outputs: StepOutputs, seconds: float = 0.0) -> None:
        delivered = {request.request_id for request in outputs.requests}
        names = self._token_names(self._in_flight.popleft(), sampled, delivered)
        ended, num_delivered = describe_ended(outputs), len(outputs.token_ids)
        self._write(Applied(now, sampled.step_id, names, num_delivered, ended, seconds, sampled.launch))
        self._ended(outputs.finished)

    def flush(self) -> None:
        """Write the buffer; a disk error ends the recording."""
        if self._file is None or not self._unwritten:
            return
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        self._num_unwritten = 0
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            log.warning("recording ends: %s", error)
            self._file = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def _write(self, event: Event) -> None:
        if self._pending_expire is not None:
            pending, self._pending_expire = self._pending_expire, None
            self._write(Expired(pending, []))
        line = encoder.encode(event) + b"\n"
        self._unwritten.append(line)
        self._num_bytes += len(line)
        self._num_unwritten += len(line)
        if self._num_bytes > self._max_bytes:
            log.warning("recording ends: it has %d bytes, its limit", self._num_bytes)
            self._unwritten.append(encoder.encode(Full()) + b"\n")
            self.flush()
            self._file = None
        elif self._num_unwritten > FLUSH_BYTES:
            self.flush()

    def _recorded(self, request: Request, *, with_contents: bool) -> RecordedRequest:
        """Describe a request; refusals do not depend on contents."""
        state, names = self._names.root, b""
        if self._with_contents and with_contents:
            state, ids = self._names.extend(state, request.prompt_token_ids.tolist())
            names = np.array(ids, dtype="<i4").tobytes()
        self._streams[request.request_id] = _Stream(request.request_id, state, frozenset(request.stop_token_ids))
        return RecordedRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt=names,
            max_tokens=request.max_tokens,
            min_tokens=request.sampling.min_tokens,
            can_stop=bool(request.stop_token_ids),
            arrival_time=request.arrival_time,
            priority=int(request.priority),
            cache_salt=self._names.word(request.cache_salt),
            tenant=self._tenant(request.tenant),
            deadline=request.deadline,
            soft_deadline=request.soft_deadline,
            session_id=self._names.word(request.session_id),
            session_ttl=request.session_ttl,
        )

    def _tenant(self, name: str) -> str:
        return name if name in self._named_tenants else self._names.word(name)

    def _token_names(self, streams: list[_Stream], sampled: SampledTokens, delivered: Collection[str]) -> bytes:
        """Return int32 names by row; tokens of rows reassigned in flight are ordinary."""
        names = [
            self._token_name(stream, token_id) if stream.request_id in delivered or token_id < 0 else ORDINARY_TOKEN
            for stream, token_id in zip(streams, sampled.token_ids.tolist(), strict=True)
        ]
        if all(name == ORDINARY_TOKEN for name in names):
            return b""
        return np.array(names, dtype="<i4").tobytes()

    def _token_name(self, stream: _Stream, token_id: int) -> int:
        if token_id < 0:
            return token_id
        if token_id in stream.stop_token_ids:
            return STOP_TOKEN
        if not self._with_contents:
            return ORDINARY_TOKEN
        stream.state, (name,) = self._names.extend(stream.state, (token_id,))
        return name

    def _ended(self, requests: Sequence[Request]) -> list[str]:
        for request in requests:
            self._streams.pop(request.request_id, None)
        return [request.request_id for request in requests]


def describe_batch(now: float, batch: ScheduledBatch, *, expired: bool, seconds: float = 0.0) -> Scheduled:
    return Scheduled(
        now,
        expired,
        batch.step_id,
        *step_features(batch),
        digest=batch_digest(batch),
        new_requests=[new.request_id for new in batch.new_rows],
        freed_rows=batch.freed_rows.tolist(),
        seconds=seconds,
    )


def batch_digest(batch: ScheduledBatch) -> str:
    """Return a digest of columns and new rows, without token ids."""
    digest = blake2b(digest_size=8)
    for name in _COLUMNS:
        column = getattr(batch, name)
        digest.update(len(column).to_bytes(4, "little"))
        digest.update(column.tobytes())
    for new in batch.new_rows:
        digest.update(f"{new.row} {new.request_id} {len(new.token_ids)} {new.num_prompt_tokens}\n".encode())
    return digest.hexdigest()


def describe_ended(outputs: StepOutputs) -> list[tuple[str, str]]:
    return [(request.request_id, str(request.finish_reason)) for request in outputs.finished]


_COLUMNS = tuple(
    name
    for name, hint in ScheduledBatch.__annotations__.items()
    if hint in ("Int32Array", "BoolArray")
)  # fmt: skip
