"""Path of a request through the front end.

    submit ─► tokeniser threads ─► gate ─► engine ─► on_tokens, on_deltas ─► response senders ─► sink
                                    ▲                    │
                                    └── no room for it ──┤
             watcher: cancels, deadlines ────────────────┴─► the request is over, and the engine drops it

Every submitted request ends its sink exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from tidewheel.batch import Int32Array, Int64Array
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.messages import AddRequest, Delta, EngineInfo, Room
from tidewheel.errors import DeadlineExceeded, Draining, InternalError, TidewheelError, WaitingSetFull
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.interface import GenerateRequest, Sink
from tidewheel.frontend.live_request import EndedRequest, Ending, LiveRequest
from tidewheel.frontend.request_figures import FrontendStats, StatsRecorder, TokenTiming
from tidewheel.frontend.request_parameters import read_urgency
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.response_senders import ResponseSenders
from tidewheel.frontend.threads import PromptQueue, Watcher, Workers
from tidewheel.frontend.token_columns import TokenColumns
from tidewheel.request import FinishReason
from tidewheel.stats import EngineStats, Objective

logger = logging.getLogger(__name__)

_DEADLINE_GRACE_NS = 100_000_000  # for the engine, which ends requests between steps
_CLOSE_TIMEOUT_S = 5.0
_SHUTTING_DOWN = "the server is shutting down"
NUM_TOKENIZERS = 2  # threads


class Frontend:
    """One thread calls `on_tokens`, `on_deltas`, `on_lost`, `on_room` and `on_drain`, which never block."""

    def __init__(
        self,
        info: EngineInfo,
        reader: RequestReader,
        engine: EngineClient,
        *,
        max_prompt_bytes: int,
        gate: AdmissionGate,
        num_senders: int = 4,
        stream_interval_s: float = 0.02,
        on_idle: Callable[[], None] = lambda: None,
        objective: Objective | None = None,
        on_ended: Callable[[EndedRequest], None] | None = None,
        poll_interval_s: float = 0.02,
    ) -> None:
        """Call `on_idle` before the last response of the last live request, `on_ended` after each request's last.

        `close` closes the reader, too.
        """
        self._reader = reader
        self._tenants = info.tenants
        self._engine = engine
        self._gate = gate
        self._recorder = StatsRecorder(info.max_model_len, objective)
        self._columns = TokenColumns()
        self._lock = threading.Lock()
        self._live: dict[int, LiveRequest] = {}
        self._closed_by: TidewheelError | None = None
        self._drained_by: TidewheelError | None = None  # as long as the engine refuses new requests
        self._prompts = PromptQueue(max_prompt_bytes, NUM_TOKENIZERS)
        self._senders = ResponseSenders(
            num_senders,
            stream_interval_s,
            self._live,
            self._columns,
            engine,
            self._recorder,
            self._forget,
            on_idle,
            on_ended,
        )
        self._watcher = Watcher(self._live, self._cancel, self._expire, interval_s=poll_interval_s)
        self._tokenizers = Workers("tokenizer", NUM_TOKENIZERS, self._prompts.take, self._prepare)

    @property
    def is_idle(self) -> bool:
        return not self._live

    def stats(self) -> FrontendStats:
        return self._recorder.snapshot()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Return at once. Errors go to the sink."""
        arrival_ns = request.arrival_ns or time.monotonic_ns()
        urgency = read_urgency(request, arrival_ns, self._tenants)
        live = LiveRequest(self._columns.open(), request, sink, arrival_ns, urgency)
        self._recorder.received()
        with self._lock:
            refusal = self._closed_by or self._drained_by or self._prompts.refusal(request.prompt_bytes)
            if refusal is None:
                self._live[live.key] = live
                self._gate.enter(live.key)
                if live.urgency.deadline_ns:
                    self._watcher.set_deadline(live, live.urgency.deadline_ns)
                self._prompts.put(live)
        if refusal is not None:
            self._senders.fail(live, refusal)

    def wait_for_room(self) -> None:
        self._gate.wait()

    def close(self, error: TidewheelError | None = None) -> None:
        """End live and later requests with the error."""
        with self._lock:
            if self._closed_by is not None:
                return
            self._closed_by = error = error or Draining(_SHUTTING_DOWN)
            live = list(self._live.values())
        self._watcher.close()
        self._gate.close()
        self._prompts.close()
        for request in live:
            self._end(request, Ending(error=error))
        self._reader.close()
        self._tokenizers.join(_CLOSE_TIMEOUT_S)
        if not self._senders.close(_CLOSE_TIMEOUT_S):
            logger.warning("%d requests have no answer, because their clients did not read in time", len(self._live))

    def _prepare(self, request: LiveRequest) -> None:
        try:
            if not request.is_over:
                prepared = self._reader.read(request.key, request.asked, request.arrival_ns)
                request.attach(prepared)
                if prepared.message is None:
                    self._end(request, Ending(FinishReason.STOP))
                self._send_to_engine(request)
        except TidewheelError as error:
            self._end(request, Ending(error=error))
        except Exception:
            logger.exception("a request could not be prepared")
            self._end(request, Ending(error=InternalError("the request could not be prepared")))
        finally:
            self._prompts.done(request)

    def _send_to_engine(self, request: LiveRequest) -> None:
        message = request.message
        if message is None or request.is_over:
            return
        try:
            if isinstance(message, AddRequest):
                self._claim(message)
            self._engine.add(message)
        except TidewheelError as error:
            self._end(request, Ending(error=error))
        else:
            if request.mark_sent():
                return
            self._engine.cancel([request.key])
        self._gate.forget(request.key)

    def _claim(self, message: AddRequest) -> None:
        try:
            self._gate.claim(message)
        except WaitingSetFull:
            self._engine.count_refused(message.options.tenant, message.options.n)
            raise

    def _send_held(self) -> None:
        for request in self._known(self._gate.release()):
            self._send_to_engine(request)

    def on_tokens(self, keys: Int64Array, token_ids: Int32Array) -> None:
        now_ns = time.monotonic_ns()
        seconds, first = self._columns.add(keys, token_ids, now_ns)
        timings = []
        for request in self._known(first):
            timings.append(_timing(request, 1, self._begin(request, now_ns), now_ns))
            if request.receive_first():
                self._senders.put(request)
        self._recorder.tokens(timings, seconds)
        self._senders.wake()

    def on_deltas(self, deltas: list[Delta]) -> None:
        now_ns = time.monotonic_ns()
        timings = []
        for delta in deltas:
            request = self._live.get(delta.key)
            if request is None or self._is_held(request, delta):
                continue  # answered, or to be sent again
            if delta.token_ids:
                since_ns = self._note_token(request, delta, now_ns)
                timings.append(_timing(request, len(delta.token_ids), since_ns, now_ns))
            if request.receive(delta):
                self._senders.put(request)
            else:
                self._columns.note_output(delta.key)
        self._recorder.tokens(timings)
        self._senders.wake()

    def _note_token(self, request: LiveRequest, delta: Delta, now_ns: int) -> int:
        """Return the time of the sequence's last token or of the request's arrival, or 0."""
        if delta.index > 0:
            since_ns = request.last_token_ns.get(delta.index, 0)
            request.last_token_ns[delta.index] = now_ns
        else:
            since_ns = self._columns.note_token(request.key, now_ns)
        return since_ns or self._begin(request, now_ns)

    def _begin(self, request: LiveRequest, now_ns: int) -> int:
        """Return the arrival time for the request's first token, else 0."""
        if request.has_output:
            return 0
        request.first_output_ns = now_ns
        return request.arrival_ns

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        self._gate.set_room(None)
        self._drained_by = None
        for request in self._known(keys):
            self._end(request, Ending(error=error), is_at_engine=False)
        self._send_held()

    def on_room(self, room: Room) -> None:
        for request in self._known(room.received):
            request.is_known_to_engine = True
        self._gate.set_room(room)
        self._send_held()

    def on_drain(self) -> None:
        """End the requests that the engine does not have."""
        with self._lock:
            self._drained_by = error = Draining(_SHUTTING_DOWN)
            left = [request for request in self._live.values() if not request.is_at_engine]
        for request in left:
            self._end(request, Ending(error=error), is_at_engine=False)

    def _known(self, keys: list[int]) -> Iterator[LiveRequest]:
        return (request for key in keys if (request := self._live.get(key)) is not None)

    def _is_held(self, request: LiveRequest, delta: Delta) -> bool:
        message = request.message
        if delta.error is None or not delta.error.is_waiting_set_full or not isinstance(message, AddRequest):
            return False
        if not self._gate.hold(message):
            return False
        if not request.mark_held():
            self._gate.forget(request.key)
        self._send_held()  # room may have appeared since
        return True

    def _cancel(self, request: LiveRequest) -> None:
        self._end(request, Ending(FinishReason.CANCELLED))

    def _expire(self, request: LiveRequest) -> None:
        """End the request, or give an engine that knows its deadline a little time to end it."""
        if request.is_known_to_engine:
            request.is_known_to_engine = False
            self._watcher.set_deadline(request, request.urgency.deadline_ns + _DEADLINE_GRACE_NS)
        elif request.has_output:
            self._end(request, Ending(FinishReason.DEADLINE))
        else:
            self._end(request, Ending(error=DeadlineExceeded("the deadline passed before the request could start")))

    def _end(self, request: LiveRequest, ending: Ending, *, is_at_engine: bool = True) -> None:
        if request.end(ending) and is_at_engine:
            self._engine.cancel([request.key])
        if request.claim_turn():
            self._senders.put(request)

    def _forget(self, request: LiveRequest) -> None:
        with self._lock:
            self._live.pop(request.key, None)
        self._columns.close(request.key)
        self._gate.forget(request.key)
        self._send_held()


class EngineRelay:
    """Listener for a front end that is made after the engine is ready."""

    def __init__(self, gate: AdmissionGate) -> None:
        self._gate = gate
        self.frontend: Frontend | None = None
        self.stats: EngineStats | None = None

    def on_tokens(self, keys: Int64Array, token_ids: Int32Array) -> None:
        if self.frontend is not None:
            self.frontend.on_tokens(keys, token_ids)

    def on_deltas(self, deltas: list[Delta]) -> None:
        if self.frontend is not None:
            self.frontend.on_deltas(deltas)

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        if self.frontend is not None:
            self.frontend.on_lost(keys, error)
        else:
            self._gate.set_room(None)

    def on_room(self, room: Room) -> None:
        if self.frontend is not None:
            self.frontend.on_room(room)
        else:
            self._gate.set_room(room)

    def on_drain(self) -> None:
        if self.frontend is not None:
            self.frontend.on_drain()

    def on_stats(self, stats: EngineStats) -> None:
        self.stats = stats


def _timing(request: LiveRequest, num_tokens: int, since_ns: int, now_ns: int) -> TokenTiming:
    is_first = not request.has_output
    num_prompt_tokens = request.outputs.num_input_tokens if is_first and request.outputs is not None else 0
    return TokenTiming((now_ns - since_ns) * 1e-9 if since_ns else None, num_tokens, num_prompt_tokens)
