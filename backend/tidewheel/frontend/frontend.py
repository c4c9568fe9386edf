"""Path of a request through the front end.

    submit ─► tokeniser threads ─► gate ─► engine ─► on_tokens, on_deltas ─► response senders ─► sink
                                    ▲                    │
                                    └── no room for it ──┤
             watcher: cancels, deadlines ────────────────┴─► the request is over, and the engine drops it

Every submitted request ends its sink exactly once.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from tidewheel.batch import Int32Array, Int64Array
from tidewheel.engine.engine_client import EngineClient
from tidewheel.engine.messages import Delta, EngineInfo, Room
from tidewheel.errors import DeadlineExceeded, Draining, InternalError, TidewheelError, WaitingSetFull
from tidewheel.frontend.admission_gate import AdmissionGate, PromptQueue
from tidewheel.frontend.ended_requests import EndedRequest
from tidewheel.frontend.live_request import Ending, LiveRequest, TokenColumns
from tidewheel.frontend.output import OutputChunk, Response, Sink, is_last
from tidewheel.frontend.request_figures import FrontendStats, StatsRecorder
from tidewheel.frontend.request_parameters import GenerateRequest, read_urgency
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.frontend.tensor_reader import TensorReader
from tidewheel.frontend.threads import ASKING_SHARE, SHORT_ASKING_SHARE, ResponseSenders, Watcher, Workers
from tidewheel.request import FinishReason
from tidewheel.stats import EngineStats

logger = logging.getLogger(__name__)

_DEADLINE_GRACE_NS = 100_000_000  # for the engine, which ends requests between steps
_PREVIEW_GRACE_NS = 10_000_000_000  # for a step under way, and a preview
_CLOSE_TIMEOUT_S = 5.0
_SHUTTING_DOWN = "the server is shutting down"
NUM_TOKENIZERS = min(2, len(os.sched_getaffinity(0)))  # threads, each with a process of some 70 MB


@dataclass(eq=False)
class Frontend:
    """Front end of one engine. The engine client's thread calls the methods `on_…`, which never block."""

    settings: FrontendSettings
    gate: AdmissionGate
    _: KW_ONLY
    on_idle: Callable[[], None] = lambda: None  # called before the last response of the last live request
    on_ended: Sequence[Callable[[EndedRequest], None]] = ()  # called after each request
    poll_interval_s: float = 0.02

    def __post_init__(self) -> None:
        self.engine_stats: EngineStats | None = None  # last report
        self._columns = TokenColumns()
        self._lock = threading.Lock()
        self._live: dict[int, LiveRequest] = {}
        self._closed_by: TidewheelError | None = None
        self._drained_by: TidewheelError | None = None  # while the engine refuses requests

    def start(self, info: EngineInfo, reader: RequestReader | TensorReader, engine: EngineClient) -> None:
        """Serve requests with a ready engine. `close` also closes `reader`."""
        self._reader = reader
        self._tenants = info.tenants
        self._engine = engine
        self._recorder = StatsRecorder(info.max_model_len, self.settings.objective)
        self._prompts = PromptQueue(reader.max_prompt_bytes, NUM_TOKENIZERS)
        self._senders = ResponseSenders(self.settings, self._live, self._columns, self._answer, info.pid)
        share = ASKING_SHARE if info.signature is None else SHORT_ASKING_SHARE
        cancel = functools.partial(self._end, ending=FinishReason.CANCELLED)
        self._watcher = Watcher(self._live, cancel, self._expire, interval_s=self.poll_interval_s, share=share)
        self._is_text = info.signature is None
        self._tokenizers = Workers("tokenizer", NUM_TOKENIZERS * self._is_text, self._prompts.take, self._tokenize)

    @property
    def is_idle(self) -> bool:
        return not self._live

    def stats(self) -> FrontendStats:
        return self._recorder.snapshot()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Return at once. Errors go to the sink."""
        urgency = read_urgency(request, self._tenants)
        live = LiveRequest(self._columns.open(), request, sink, urgency)
        self._recorder.received()
        with self._lock:
            refusal = self._closed_by or self._drained_by or self._prompts.refusal(request.prompt_bytes)
            if refusal is None:
                self._live[live.key] = live
                self.gate.enter(live.key)
                if self._is_text:
                    self._prompts.put(live)
        if refusal is not None:
            self._fail(live, refusal)
        elif not self._is_text:
            self._prepare(live)

    def refuse(self, request_id: str, sink: Sink, arrival_ns: int, error: TidewheelError) -> None:
        """Fail a request that could not be read or sent to the engine."""
        self._recorder.received()
        self._recorder.failed(error, had_output=False)
        sink.fail(error)
        for note in self.on_ended:
            note(EndedRequest(request_id, arrival_ns, time.monotonic_ns(), tag=error.tag))

    def close(self, error: TidewheelError | None = None) -> None:
        """End live and later requests with `error`, by default `Draining`."""
        with self._lock:
            if self._closed_by is not None:
                return
            self._closed_by = error = error or Draining(_SHUTTING_DOWN)
            live = list(self._live.values())
        self._watcher.close()
        self.gate.close()
        self._prompts.close()
        for request in live:
            self._end(request, error)
        self._reader.close()
        self._tokenizers.join(_CLOSE_TIMEOUT_S)
        if not self._senders.close(_CLOSE_TIMEOUT_S):
            logger.warning("%d requests have no answer, because their clients did not read in time", len(self._live))

    def _tokenize(self, request: LiveRequest) -> None:
        try:
            self._prepare(request)
        finally:
            self._prompts.done(request)

    def _prepare(self, request: LiveRequest) -> None:
        try:
            if not request.is_over:
                prepared = self._reader.read(request.key, request.asked)
                request.attach(prepared, self.submit)
                if prepared.message is None:
                    self._end(request, FinishReason.STOP)
                self._send_to_engine(request)
                if prepared.speech is not None and not request.is_over:
                    prepared.speech.submit_waiting()
        except TidewheelError as error:
            self._end(request, error)
        except Exception:
            logger.exception("a request could not be prepared")
            self._end(request, InternalError("the request could not be prepared"))

    def _send_to_engine(self, request: LiveRequest) -> None:
        message = request.prepared.message
        if message is None or request.is_over:
            _discard(request)
            return
        try:
            if not message.options.order:
                self.gate.claim(message)
            self._engine.add(message)
        except TidewheelError as error:
            if isinstance(error, WaitingSetFull):
                self._engine.count_refused(message.options.tenant, message.options.n)
            self._end(request, error)
        else:
            if request.mark_sent():
                return
            self._engine.cancel(request.key)
        self.gate.forget(request.key)

    def _send_held(self) -> None:
        for request in self._known(self.gate.release()):
            self._send_to_engine(request)

    def on_tokens(self, keys: Int64Array, token_ids: Int32Array) -> None:
        now_ns = time.monotonic_ns()
        seconds, first = self._columns.add(keys, token_ids, now_ns)
        for request in self._known(first):
            self._count_tokens(request, 1, 0, now_ns)
            if request.receive_first():
                self._senders.put(request)
        self._recorder.single_tokens(seconds)
        self._senders.wake()

    def on_deltas(self, deltas: list[Delta]) -> None:
        now_ns = time.monotonic_ns()
        for delta in deltas:
            if delta.outputs is not None:
                delta.outputs.claim()
            request = self._live.get(delta.key)
            if request is None or self._is_held(request, delta):
                continue  # answered, or to be sent again
            if delta.token_ids:
                self._count_tokens(request, len(delta.token_ids), self._note_token(request, delta, now_ns), now_ns)
            if request.receive(delta):
                self._senders.put(request)
            else:
                self._columns.note_output(delta.key)
        self._senders.wake()

    def _note_token(self, request: LiveRequest, delta: Delta, now_ns: int) -> int:
        if delta.index <= 0:
            return self._columns.note_token(request.key, now_ns)
        last_ns = request.last_token_ns.get(delta.index, 0)
        request.last_token_ns[delta.index] = now_ns
        return last_ns

    def _count_tokens(self, request: LiveRequest, num_tokens: int, last_ns: int, now_ns: int) -> None:
        if request.has_output:
            self._recorder.tokens(num_tokens, (now_ns - last_ns) * 1e-9 if last_ns else None)
            return
        request.first_output_ns, outputs = now_ns, request.prepared.outputs
        num_prompt_tokens = 0 if outputs is None else outputs.num_input_tokens
        self._recorder.tokens(num_tokens, (now_ns - request.arrival_ns) * 1e-9, num_prompt_tokens)

    def on_stats(self, stats: EngineStats) -> None:
        self.engine_stats = stats

    def on_run(self, keys: list[int]) -> None:
        for key in keys:
            request = self._live.get(key)
            if request is not None and request.asked.call is not None:
                request.asked.call.start(functools.partial(self._engine.report, key))
            else:
                self._engine.report(key)  # answered meanwhile

    def on_lost(self, keys: list[int], error: TidewheelError) -> None:
        self.gate.set_room(None)
        self._drained_by = None
        for request in self._known(keys):
            self._end(request, error, is_at_engine=False)
        self._send_held()

    def on_room(self, room: Room) -> None:
        for request in self._known(room.received):
            request.is_known_to_engine = True
        self.gate.set_room(room)
        self._send_held()

    def on_drain(self) -> None:
        """End the requests that have not reached the engine."""
        with self._lock:
            self._drained_by = error = Draining(_SHUTTING_DOWN)
            left = [request for request in self._live.values() if not request.is_at_engine]
        for request in left:
            self._end(request, error, is_at_engine=False)

    def _known(self, keys: list[int]) -> Iterator[LiveRequest]:
        return (request for key in keys if (request := self._live.get(key)) is not None)

    def _is_held(self, request: LiveRequest, delta: Delta) -> bool:
        message = request.prepared.message
        is_full = delta.error is not None and delta.error.is_waiting_set_full
        if message is None or not is_full or not self.gate.hold(message):
            return False
        if not request.mark_held():
            self.gate.forget(request.key)
        self._send_held()  # room may have appeared since
        return True

    def _expire(self, request: LiveRequest) -> None:
        """End a request past its deadline; give an engine that knows the request a grace to end it."""
        if request.is_known_to_engine:
            request.is_known_to_engine = False
            message = request.prepared.message
            takes_preview = message and message.step_options and message.step_options.on_deadline == "preview"
            request.expires_ns = request.deadline_ns + (_PREVIEW_GRACE_NS if takes_preview else _DEADLINE_GRACE_NS)
        elif request.has_output:
            self._end(request, FinishReason.DEADLINE)
        else:
            self._end(request, DeadlineExceeded("the deadline passed before the request could start"))

    def _end(self, request: LiveRequest, ending: Ending, *, is_at_engine: bool = True) -> None:
        if request.end(ending) and is_at_engine:
            self._engine.cancel(request.key)
        if request.claim_turn():
            self._senders.put(request)

    def _answer(self, request: LiveRequest, now_ns: int) -> None:
        try:
            answer = self._next_answer(request, now_ns)
        except Exception:
            logger.exception("the output of a request could not be made into text")
            answer = InternalError("the output could not be made into text")
        if isinstance(answer, TidewheelError):
            self._fail(request, answer)
        elif answer is not None:
            self._send(request, answer)

    def _next_answer(self, request: LiveRequest, now_ns: int) -> Response | TidewheelError | None:
        deltas, ending = request.take_output()  # before the tokens, which precede them
        if token_ids := self._columns.take(request.key, now_ns):
            deltas = [Delta(request.key, token_ids), *deltas]
        outputs = request.prepared.outputs
        if outputs is not None:
            stopped = outputs.push(deltas)
            if outputs.is_over:
                return outputs.take()
            for index in stopped:
                self._engine.cancel(request.key, index)
        if ending is None:
            return outputs.take() if outputs is not None and request.asked.stream and outputs.has_tokens else None
        if isinstance(ending, TidewheelError):
            return ending
        if outputs is None:  # cancelled early, or nothing to generate
            text = request.prepared.answer or "".join(delta.answer for delta in deltas)
            return [OutputChunk(text=text, finish_reason=ending)]
        return outputs.end(ending) or outputs.take()

    def _fail(self, request: LiveRequest, error: TidewheelError) -> None:
        self._forget(request)
        seconds = None if request.was_accepted else (time.monotonic_ns() - request.arrival_ns) * 1e-9
        self._recorder.failed(error, had_output=request.has_output, refused_after=seconds)
        request.sink.fail(error)
        self._report_end(request, error=error)

    def _send(self, request: LiveRequest, response: Response) -> None:
        request.num_responses += 1
        if not is_last(response):
            request.sink.send(response)
            return
        self._forget(request)
        seconds, outputs = (time.monotonic_ns() - request.arrival_ns) * 1e-9, request.prepared.outputs
        num_output_tokens = [] if outputs is None else outputs.num_output_tokens
        self._recorder.finished(response[0], seconds, num_output_tokens, request.urgency.priority)
        if not self._live:
            self.on_idle()
        request.sink.send(response)
        self._report_end(request, response)

    def _report_end(self, request: LiveRequest, response: Response = (), error: TidewheelError | None = None) -> None:
        for note in self.on_ended:
            note(EndedRequest.of(request, time.monotonic_ns(), response, error))

    def _forget(self, request: LiveRequest) -> None:
        if request.mark_answered():
            self._engine.cancel(request.key)
        _discard(request)
        with self._lock:
            self._live.pop(request.key, None)
        self._columns.close(request.key)
        self.gate.forget(request.key)
        self._send_held()


def _discard(request: LiveRequest) -> None:
    """Give up the memory of a request's tensors."""
    asked, message = request.asked, request.prepared.message
    if asked.call is not None:
        asked.call.discard()
    inputs = message.inputs if message is not None else asked.inputs
    if inputs is not None:
        inputs.discard(is_unused=request.has_left_engine)
