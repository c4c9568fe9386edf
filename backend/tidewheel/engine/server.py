import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import zmq

from tidewheel.config import EngineConfig, describe_changes
from tidewheel.engine import messages
from tidewheel.engine.build import scheduler_config, session_limits
from tidewheel.engine.core import EngineCore, Runner
from tidewheel.engine.front_ends import FrontEnd, FrontEnds
from tidewheel.engine.grammar_queue import GrammarQueue
from tidewheel.engine.heartbeat import ListeningClock
from tidewheel.engine.lora_registry import LoraRegistry
from tidewheel.engine.requests import to_requests
from tidewheel.engine.shared_device import UnsharedDevice
from tidewheel.errors import ConfigError, Draining, EngineDead, InternalError, InvalidRequest, TidewheelError
from tidewheel.grammar import TokenGrammar
from tidewheel.one_shot.runner import RemoteRunner
from tidewheel.one_shot.shared_tensors import remove_unread, sweep_kept
from tidewheel.request import FinishReason
from tidewheel.runner.grammar_compiler import GrammarCompiler
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.tenants import parse_tenants

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.5
IDLE_POLL_MS = 250
RECEIVE_S = 0.002
FIRST_STEPS = 20  # of unknown length, in a load


@dataclass(eq=False)
class EngineServer:
    """Engine's step loop with a bound ROUTER socket. A malformed message affects only its sender."""

    linger_s = 10.0  # without a front end

    socket: zmq.Socket[bytes]
    scheduler: Scheduler
    runner: InitVar[Runner]
    info: messages.EngineInfo
    _: KW_ONLY
    config: EngineConfig  # which a front end may replace
    identity: str = ""
    note: Callable[..., None] = lambda **_: None  # changes the engine's status
    beat: Callable[[float | None, int], None] = lambda _, __: None
    arbiter: UnsharedDevice = field(default_factory=UnsharedDevice)
    lora_file: Path | None = None  # of orders about adapters, for the next engine
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, runner: Runner) -> None:
        self._started = self.config
        self._read_ns = 0
        self._seeds = random.Random(self.config.seed)  # noqa: S311 - samples tokens, guards nothing
        self._listened = ListeningClock(self.clock)
        self._front_ends = FrontEnds(self.socket)
        if isinstance(runner, RemoteRunner):
            runner.run = self._front_ends.run
        self._core = EngineCore(
            self.scheduler,
            runner,
            self._front_ends.deliver,
            receive=self._receive,
            beat=self._beat,
            first_step_s=self.config.engine_start_timeout_s / FIRST_STEPS,
            arbiter=self.arbiter,
            clock=self.clock,
        )
        folder = Path(self.config.tokenizer or self.info.model)
        self._grammars = GrammarQueue(GrammarCompiler(folder, self.info.vocab_size))
        self._loras = LoraRegistry(self.config, runner, self.scheduler.loras, self.lora_file)
        self._is_draining = False
        self._next_stats = 0.0
        self._alone_since = self.clock()

    def serve(self, must_stop: Callable[[], str]) -> str:
        """Serve until `must_stop` gives a reason, or `linger_s` without a front end. Return the reason."""
        while True:
            worked = self._core.step()
            self._front_ends.send_room(self.scheduler.admission.waiting_room(self.clock()))
            if worked and not self._core.has_unfinished and self.info.signature is None:
                self._front_ends.broadcast(self._figures())  # before the last answer, so that its client sees them
            self._front_ends.flush()
            reason = self._maintain(must_stop)
            if reason:
                return reason
            if not worked:
                self._wait()

    def end_all(self, error: TidewheelError) -> None:
        """Tell all front ends that their requests end with the error. Works with a broken scheduler or runner."""
        self._front_ends.flush()
        self._front_ends.broadcast(messages.Disconnection(messages.ErrorInfo.of(error)))

    def _beat(self, expected_s: float | None) -> None:
        self.beat(expected_s, len(self._front_ends))

    def _wait(self) -> None:
        self._beat(None)
        if self.config.debug_invariants:
            self.scheduler.check_invariants()
        is_busy = self.scheduler.num_waiting > 0 if self.config.is_remote else self._core.has_unfinished
        is_busy = is_busy or self._grammars.num_waiting > 0 or bool(self._loras.reads)
        self.arbiter.wait(self.socket, 1 if is_busy else IDLE_POLL_MS)

    def _maintain(self, must_stop: Callable[[], str]) -> str:
        now, listened = self.clock(), self._listened()
        if now < self._next_stats:
            return ""
        self._next_stats = now + STATS_INTERVAL_S
        self._front_ends.broadcast(self._figures())
        remove_unread()
        for front_end, reason in self._front_ends.find_gone(listened):
            self._drop(front_end, f"is gone ({reason})")
            self._send_disconnection(front_end.identity, f"the engine counts this front end as gone: {reason}")
        if self._front_ends:
            self._alone_since = now
        elif now - self._alone_since >= self.linger_s:
            return "the last front end is gone"
        return must_stop()

    def _figures(self) -> messages.Stats:
        stats = self._core.stats()
        stats.num_waiting += self._grammars.num_waiting
        return messages.Stats(stats)

    def _drop(self, front_end: FrontEnd, how: str) -> None:
        self._grammars.cancel(front_end)
        orphans = self._front_ends.remove(front_end)
        log.info("front end %s %s: %d requests end", front_end.name, how, len(orphans))
        for request_id in orphans:
            self._core.cancel(request_id)
        sweep_kept()

    def _send_disconnection(self, identity: bytes, reason: str) -> None:
        error = messages.ErrorInfo.of(EngineDead(reason, retry_after_ms=messages.RETRY_AFTER_MS))
        self._front_ends.send(identity, messages.Disconnection(error))

    def _receive(self) -> None:
        self._loras.poll()
        for front_end, message, grammar in self._grammars.take_compiled():
            self._add_compiled(front_end, message, grammar)
        until = self.clock() + RECEIVE_S
        is_first = True
        while is_first or self.clock() < until:
            is_first = False
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 2:
                log.warning("ignored a message of %d parts", len(parts))
                continue
            self._handle(*parts)

    def _handle(self, identity: bytes, payload: bytes) -> None:
        front_end = self._front_ends.get(identity)
        if front_end is not None:
            front_end.last_seen = self._listened()
        try:
            message = messages.to_engine_decoder.decode(payload)
        except Exception as error:  # value checks raise errors of their own
            self._handle_malformed(front_end, payload, error)
            return
        match message:
            case messages.Hello():
                self._greet(identity, message)
            case messages.Drain():
                self._drain(identity)
            case messages.ListRequests():
                unfinished = self.scheduler.unfinished()
                rows = self._front_ends.list_requests(unfinished, self.clock(), message.limit)
                self._front_ends.send(identity, messages.RequestList(self.info.pid, rows, len(unfinished)))
            case messages.CancelRequest():
                self._cancel_request(identity, message)
            case _ if front_end is None:
                if not isinstance(message, messages.Goodbye):
                    self._send_disconnection(identity, "the engine does not know this front end")
            case _:
                self._handle_known(front_end, message)

    def _handle_known(self, front_end: FrontEnd, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest():
                self._add(front_end, message)
            case messages.BatchDone():
                for key, error in message.ends:
                    for request_id in list(front_end.request_ids.get(key, {}).values()):
                        self._core.finish(request_id, None if error is None else error.to_error())
            case messages.Cancel():
                self._cancel(front_end, message)
            case messages.Ping():
                self.scheduler.admission.observe_refused(message.refused)
            case messages.Goodbye():
                self._drop(front_end, "leaves")
                if not self._front_ends:
                    self._alone_since = -math.inf

    def _greet(self, identity: bytes, hello: messages.Hello) -> None:
        is_foreign = hello.protocol != messages.PROTOCOL
        if is_foreign:
            failure = (
                f"the engine speaks protocol {messages.PROTOCOL}, the front end {hello.protocol}: restart the server"
            )
        elif hello.identity not in ("", self.identity):
            failure = "the engine of this model was started with other settings or files: load the model again"
        else:
            failure = self._take_settings(hello)
        if failure:
            self._front_ends.send(identity, messages.EngineFailure(failure, is_foreign))
        else:
            self._front_ends.admit(identity, hello.client, self._listened())
            log.info("front end %s joins", hello.client)
            self._front_ends.send(identity, messages.EngineReady(self.info))

    def _take_settings(self, hello: messages.Hello) -> str:
        if hello.read_ns <= self._read_ns:
            return ""
        try:
            config = EngineConfig.from_settings(hello.settings)
            if not self._started.can_become(config):
                raise ConfigError(f"the engine cannot take {describe_changes(self.config, config)} while it runs")
            if config != self.config:
                self.scheduler.reconfigure(scheduler_config(config, self.info), session_limits(config))
                self._loras.reconfigure(config)
                log.info("takes other settings: %s", describe_changes(self.config, config))
        except ConfigError as error:
            return str(error)
        self.config, self._read_ns = config, hello.read_ns
        tenants = parse_tenants(config.tenants)
        self.info = msgspec.structs.replace(self.info, tenants=tenants, max_logprobs=config.max_logprobs)
        self.note(settings=config.to_settings(), read_ns=hello.read_ns, info=self.info)
        return ""

    def _drain(self, identity: bytes) -> None:
        if not self._is_draining:
            log.info("draining: new requests are refused")
            self._is_draining = True
            self.note(is_draining=True)
            self._front_ends.broadcast(messages.Drain())
        self._front_ends.send(identity, self._figures())

    def _cancel_request(self, identity: bytes, message: messages.CancelRequest) -> None:
        is_meant = message.pid == self.info.pid
        leaving = self._front_ends.siblings(str(message.number)) if is_meant else []
        if leaving:
            log.info("request %d is cancelled by an operator", message.number)
        for request_id in leaving:
            self._core.cancel(request_id)
        self._front_ends.send(identity, messages.CancelReply(bool(leaving)))

    def _add(self, front_end: FrontEnd, message: messages.AddRequest) -> None:
        front_end.received.append(message.key)
        with self._refusing(front_end, message.key):
            if self._is_draining:
                raise Draining("the server is shutting down")
            grammar = self._grammars.kept.find(message.grammar) if message.grammar else None
            if message.options.lora_order:
                self._loras.take_order(message.options, partial(self._front_ends.end, front_end, message.key))
            elif message.options.order:
                options, now = message.options, self.clock()
                if options.close_session:
                    self.scheduler.close_session(options.tenant, options.session_id)
                else:
                    self.scheduler.pause_session(options.tenant, options.session_id, options.pause_session, now)
                self._front_ends.end(front_end, message.key, FinishReason.STOP)
            elif message.grammar and grammar is None:
                self._grammars.add(front_end, message)
            else:
                self._add_compiled(front_end, message, grammar)

    def _add_compiled(
        self, front_end: FrontEnd, message: messages.AddRequest, grammar: TokenGrammar | TidewheelError | None
    ) -> None:
        with self._refusing(front_end, message.key):
            if isinstance(grammar, TidewheelError):
                raise grammar
            ids = self._front_ends.open(front_end, message.key, message.options.n, message.request_id)
            try:
                seed, now = self._seeds.getrandbits(64), self.clock()
                lora = self._loras.find(message.options.lora_name)
                requests = to_requests(
                    message, self.info, self.config, request_ids=ids, seed=seed, now=now, grammar=grammar, lora=lora
                )
                self._core.add_group(requests)
            except Exception as error:
                self._front_ends.forget(front_end, message.key)
                if isinstance(error, TidewheelError):
                    raise
                log.exception("a request could not be added")
                raise InternalError(f"the request could not be added: {type(error).__name__}") from None

    @contextlib.contextmanager
    def _refusing(self, front_end: FrontEnd, key: int) -> Iterator[None]:
        try:
            yield
        except TidewheelError as error:
            self._front_ends.end(front_end, key, error)

    def _cancel(self, front_end: FrontEnd, message: messages.Cancel) -> None:
        for key, index in message.sequences:
            is_whole = index == messages.WHOLE_REQUEST
            if is_whole and self._grammars.cancel(front_end, key):
                self._front_ends.end(front_end, key, FinishReason.CANCELLED)
            for number, request_id in reversed(list(front_end.request_ids.get(key, {}).items())):
                if is_whole or number == index:
                    self._core.cancel(request_id)

    def _handle_malformed(self, front_end: FrontEnd | None, payload: bytes, error: Exception) -> None:
        log.warning("malformed message of %d bytes: %s", len(payload), error)
        key = _readable_key(payload)
        if front_end is not None and key is not None and key not in front_end.request_ids:
            refusal = error if isinstance(error, TidewheelError) else InvalidRequest(f"malformed request: {error}")
            self._front_ends.end(front_end, key, refusal)


def _readable_key(payload: bytes) -> int | None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        match msgspec.msgpack.decode(payload):
            case ["AddRequest", int(key), *_] if not isinstance(key, bool):
                return key
    return None
