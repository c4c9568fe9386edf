import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from tidewheel.batch import Int32Array, Int64Array
from tidewheel.engine import messages
from tidewheel.engine.connection import LAST_WORDS_MS, Connection, Outbox
from tidewheel.engine.folder import EngineTarget, read_status
from tidewheel.engine.launcher import EngineLauncher, engine_command
from tidewheel.errors import ConfigError, Draining, EngineDead, InternalError, PermanentError, TidewheelError
from tidewheel.health_endpoint import DRAINING, READY, Readiness
from tidewheel.stats import EngineStats
from tidewheel_process.child import RestartPolicy

log = logging.getLogger(__name__)

POLL_MS = 200
SEEK_POLL_MS = 20
LOOK_S = 0.1
DUMP_GRACE_S = 0.5  # from SIGUSR1, which logs all stacks, to SIGKILL
CLOSED = "the front end was closed"
MAX_REFUSED_TENANTS = 1024  # per ping; others count under the empty name


class EngineListener(Protocol):
    """Callbacks of an engine client, called on its thread; they must not block."""

    def on_tokens(self, keys: Int64Array, token_ids: Int32Array) -> None: ...  # a token for each key

    def on_deltas(self, deltas: list[messages.Delta]) -> None: ...

    def on_run(self, keys: list[int]) -> None: ...  # answered by `EngineClient.report`, once for each key

    def on_lost(self, keys: list[int], error: TidewheelError) -> None: ...  # with their engine

    def on_stats(self, stats: EngineStats) -> None: ...

    def on_room(self, room: messages.Room) -> None: ...

    def on_drain(self) -> None: ...


class EngineClient:
    """Connection of a front end to an engine, which it starts or joins.

    An accepted request ends once, with a final delta or `on_lost`, unless it was cancelled before it was sent.
    """

    command: Sequence[str] = ()  # that starts an engine; empty: `engine_command`
    restart = RestartPolicy()
    hold_s = 10.0  # for a restarting engine
    ping_interval_s = 1.0

    def __init__(self, target: EngineTarget, listener: EngineListener, *, name: str) -> None:
        self._engine_dir = target.folder
        self._listener = listener
        self._hello = messages.Hello(
            messages.PROTOCOL, name, target.identity, target.config.to_settings(), target.read_ns
        )
        self._launcher = EngineLauncher(target, command=self.command or engine_command(), policy=self.restart)
        self._outbox = Outbox(hold_s=self.hold_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._connection: Connection | None = None
        self._refused: Counter[str] = Counter()  # by tenant
        self._refused_lock = threading.Lock()
        self._set_connection(None)
        self._info: messages.EngineInfo | None = None
        self.num_restarts = 0
        self._seeking_since_ns = time.monotonic_ns()
        self._next_ping = 0.0
        self._next_look = 0.0
        self._problem = ""
        self._failure: TidewheelError | None = None
        self._settled = threading.Event()  # ready, or failed to load
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    def start(self, timeout_s: float, must_stop: Callable[[], bool] = lambda: False) -> messages.EngineInfo:
        """Wait until the engine serves. Raise `ConfigError`, or `Draining` if `must_stop()`."""
        self._thread.start()
        end = time.monotonic() + timeout_s
        while not self._settled.wait(POLL_MS / 1000) and time.monotonic() < end:
            if must_stop():
                raise Draining(CLOSED)
        if not self._settled.is_set():
            status = read_status(self._engine_dir)
            stage = f" ({status.state} {status.stage})".replace(" )", ")") if status is not None else ""
            raise ConfigError(f"the engine was not ready within {timeout_s:g} s{stage}: raise engine_start_timeout_s")
        if self._failure is not None:
            raise ConfigError(self._failure.message)
        assert self._info is not None
        return self._info

    @property
    def is_owner(self) -> bool:
        """Return whether this client keeps the engine alive."""
        return self._launcher.is_owner

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def readiness(self) -> Readiness:
        failure, connection = self._failure, self._connection
        if failure is not None:
            return Readiness("draining" if isinstance(failure, Draining) else "given up", failure.message)
        if connection is None or not connection.is_ready:
            reason = self._problem or "the engine is being started"
            return Readiness("starting" if self._info is None else "reloading", reason)
        if connection.is_draining:
            return DRAINING
        return Readiness("hung", connection.hang.describe()) if connection.hang.is_hung else READY

    def add(self, message: messages.AddRequest) -> None:
        """Send a request. Raise `Busy`, `EngineDead`, `Draining` or `InternalError`."""
        self._outbox.put(message.key, messages.encoder.encode(message), message.options.n)

    def count_refused(self, tenant: str, count: int) -> None:
        with self._refused_lock:
            known = tenant in self._refused or len(self._refused) < MAX_REFUSED_TENANTS
            self._refused[tenant if known else ""] += count

    def cancel(self, key: int, index: int = messages.WHOLE_REQUEST) -> None:
        self._outbox.put_cancel(key, index)

    def report(self, key: int, error: TidewheelError | None = None) -> None:
        self._outbox.put_done(key, None if error is None else messages.ErrorInfo.of(error))

    def close(self) -> None:
        """End requests in flight with `on_lost`. Repeatable."""
        if self._is_closing:
            return
        self._is_closing = True
        self._outbox.wake()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._leave()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                try:
                    self._run_once()
                except Exception as error:
                    log.exception("the engine client failed")
                    self._put_off(InternalError(f"the engine client failed: {type(error).__name__}"))
                    time.sleep(POLL_MS / 1000)
        finally:
            self._leave()

    def _run_once(self) -> None:
        timeout_ms = SEEK_POLL_MS if self._connection is None and self._failure is None else POLL_MS
        self._poller.poll(timeout_ms)
        self._outbox.clear_wake()
        try:
            if self._connection is not None:
                self._exchange(self._connection)
            elif self._failure is None and (status := self._launcher.seek(self._seeking_since_ns)) is not None:
                connection = Connection(self._context, self._engine_dir, status)
                self._set_connection(connection)
                connection.send(self._hello)
        except PermanentError as error:
            if self._info is not None:
                self._launcher.give_up(str(error))
            self._fail(EngineDead(str(error)))
        except ConfigError as error:
            self._put_off(_lost(str(error)))
        except Draining as error:
            self._fail(error)
        if expired := self._outbox.lose_expired():
            problem = self._problem and f": {self._problem}"
            self._lose(expired, _lost(f"the engine is not back after {self.hold_s:g} s{problem}"))

    def _exchange(self, connection: Connection) -> None:
        received = connection.receive()
        for message in received:
            self._handle(connection, message)
        if self._connection is not connection:
            return
        now = time.monotonic()
        if not received and connection.process.has_ended:
            while self._connection is connection and (received := connection.receive(LAST_WORDS_MS)):
                for message in received:
                    self._handle(connection, message)
            self._disconnect(_lost("the engine process ended; it is being started again"))
        elif self._must_kill(connection):
            connection.process.end(signal.SIGUSR1, DUMP_GRACE_S)
            self._disconnect(_lost("the engine hung and was killed; it is being started again"))
        elif connection.is_ready:
            self._outbox.flush(connection.send_encoded)
        if now >= self._next_ping and self._connection is not None:
            self._next_ping = now + self.ping_interval_s
            connection.send(messages.Ping(self._take_refused()))
            self._launcher.try_lock()

    def _must_kill(self, connection: Connection) -> bool:
        hang, now = connection.hang, time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        was_hung = hang.is_hung
        hang.look()
        if not self.is_owner:
            return False
        process = connection.process
        if hang.is_hung and not was_hung:
            log.error("engine %d hangs: %s; its log shows where", process.pid, hang.describe())
            process.send_signal(signal.SIGUSR1)
        elif was_hung and not hang.is_hung:
            log.warning("engine %d goes on", process.pid)
        if hang.must_end:
            log.error("engine %d is killed: %s", process.pid, hang.describe())
        return hang.must_end

    def _take_refused(self) -> dict[str, int]:
        with self._refused_lock:
            refused, self._refused = self._refused, Counter()
        return refused

    def _handle(self, connection: Connection, message: messages.FromEngine) -> None:
        match message:
            case messages.Deltas():
                self._take(message)
            case messages.Stats():
                self._notify(self._listener.on_stats, message.stats)
            case messages.Room():
                self._notify(self._listener.on_room, message)
            case messages.EngineReady():
                self.num_restarts += self._info is not None and self._info.pid != message.info.pid
                self._info = message.info
                self._launcher.was_ready = True
                connection.is_ready = True
                self._problem = ""
                self._settled.set()
            case messages.Drain():
                connection.is_draining = True
                self._notify(self._listener.on_drain)
            case messages.Disconnection():
                self._disconnect(message.error.to_error())
            case messages.EngineFailure():
                raise PermanentError(message.message) if message.is_permanent else ConfigError(message.message)

    def _take(self, message: messages.Deltas) -> None:
        self._outbox.ended(message.deltas)
        if message.to_run:
            self._notify(self._listener.on_run, message.to_run)
        for tokens in message.tokens:
            self._notify(self._listener.on_tokens, *tokens.arrays())
        if message.deltas:
            self._notify(self._listener.on_deltas, message.deltas)

    def _disconnect(self, error: TidewheelError) -> None:
        if self._connection is None:
            return
        log.warning("connection to the engine lost: %s", error.message)
        self._connection.close()
        self._set_connection(None)
        self._seeking_since_ns = time.monotonic_ns()
        self._notify(self._listener.on_lost, self._outbox.lose_in_flight(), error)

    def _put_off(self, error: TidewheelError) -> None:
        if self._info is None:
            self._fail(EngineDead(error.message))
            return
        if self._problem != error.message:
            log.error("%s; tried again", error.message)
        self._problem = error.message
        self._disconnect(error)
        self._launcher.put_off()

    def _fail(self, error: TidewheelError) -> None:
        log.error("%s", error.message)
        self._failure = error
        self._lose(self._outbox.refuse(error), error)
        self._disconnect(error)
        self._settled.set()
        self._launcher.release()

    def _lose(self, keys: list[int], error: TidewheelError) -> None:
        if keys:
            self._notify(self._listener.on_lost, keys, error)

    def _notify(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("a listener of the engine failed")

    def _leave(self) -> None:
        if self._failure is None:
            self._failure = closed = Draining(CLOSED)
            self._lose(self._outbox.refuse(closed), closed)
        self._settled.set()
        if self._connection is not None:
            self._connection.send(messages.Goodbye())
            self._connection.close()
            self._connection = None
        self._launcher.release()
        self._context.term()
        self._outbox.close()

    def _set_connection(self, connection: Connection | None) -> None:
        self._connection = connection
        self._poller = zmq.Poller()
        self._poller.register(self._outbox.wake_fd, zmq.POLLIN)
        if connection is not None:
            connection.register(self._poller)


def _lost(reason: str) -> EngineDead:
    return EngineDead(reason, retry_after_ms=messages.RETRY_AFTER_MS)
