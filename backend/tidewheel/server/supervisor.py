from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM, strsignal
from types import TracebackType

from tidewheel.engine.connection import drain
from tidewheel.engine.launcher import stop_engine
from tidewheel.server import ServeError, processes
from tidewheel.server.console import Phase
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.launch import BACKEND
from tidewheel.server.locate import STUB_NAME
from tidewheel.server.processes import StopSignals
from tidewheel.server.server_log import LogLine, ServerLog
from tidewheel.server.triton_http import TritonHttp

POLL_S = 0.1
LOOK_S = 0.5  # between two looks at all processes
REAP_GRACE_S = 2.5  # Triton reaps a stub it ends at once, and one that died while it loaded within 2 s
DEATH_GRACE_S = 2.5  # for the rest after a death
DRAIN_ANSWER_S = 1.0
FINAL_ANSWERS_S = 3.0  # for an engine to answer cut-off requests
SETTLE_S = 2.0  # for Triton to send last answers and to unload idle models
ENGINE_GRACE_S = 5.0
_READ_BYTES = 1 << 16


class Supervisor:
    """Owner of tritonserver and every process below this one, which end with the `with` block."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        signals: StopSignals,
        log: ServerLog,
        guard: int,  # process that is not ended with the others
        on_line: Callable[[LogLine, Phase], None],
    ) -> None:
        self._signals = signals
        self._guard = guard
        self._log = log
        self._on_line = on_line
        self._phase: Phase = "loading"
        self._unreaped: dict[processes.Process, float] = {}  # ended stubs, and when they were seen first
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, signals.clear)
        processes.adopt_orphans()
        # In its own session: Ctrl-C reaches only this process, which ends the others in order.
        self._server = subprocess.Popen(  # noqa: S603 - the located program
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        self._output = self._server.stdout.fileno()
        os.set_blocking(self._output, False)
        self._selector.register(self._output, selectors.EVENT_READ, self._read_output)
        started = processes.read(self._server.pid)
        assert started is not None  # not reaped before `poll`
        self._watch = processes.Watch(started)
        if self._watch.fileno is not None:
            self._selector.register(self._watch.fileno, selectors.EVENT_READ, lambda: None)

    @property
    def stop_requested(self) -> bool:
        return self._signals.count > 0

    @property
    def was_forced(self) -> bool:
        return self._signals.count > 1

    def wait_ready(self, is_ready: Callable[[], bool], on_tick: Callable[[], None]) -> bool:
        """Return whether the server became ready before a stop. Raise `ServeError` if it cannot."""
        while not is_ready():
            self._pump(POLL_S)
            on_tick()
            if self.stop_requested:
                return False
            has_ended = self._server.poll() is not None
            if has_ended:
                self._read_output()
            if self._log.failure is not None:
                raise ServeError(f"model {self._log.failure.model!r} cannot be loaded: {self._log.failure.reason}")
            if has_ended:
                raise ServeError(f"tritonserver ended at its start ({self._exit()}): {self._log.last_words()}")
        self._phase = "ready"
        return True

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Return when asked to stop or `is_over()`. Raise `ServeError` if tritonserver or a stub dies."""
        next_look = 0.0
        while not self.stop_requested and not is_over():
            self._pump(POLL_S)
            if self._watch.has_ended():
                self._read_output()
                raise ServeError(f"tritonserver died ({self._exit()}); it printed last:\n{self._log.quote()}")
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + LOOK_S
            if (stub := self._find_dead_stub()) is not None:
                end = "ending the server, its supervisor may start it again"
                raise ServeError(f"a front end died (stub process {stub.pid}): {end}")
            processes.reap(keep=self._server.pid)

    def drain(self, engine_dirs: Sequence[Path], limit_s: float, endpoints: Endpoints) -> None:
        """Refuse new requests; let the others end, after the limit with an error.

        A connection keeps Triton from unloading models, which clients would read as an unknown model. Afterwards
        Triton would wait for every idle one, so it is ended.
        """
        self._begin_stop()
        end = time.monotonic() + limit_s
        idle = _drain_engines(engine_dirs)
        has_others = idle is None or _has_other_backends(endpoints)
        with endpoints.connect() if idle is not None else contextlib.nullcontext():
            self._server.send_signal(SIGTERM)
            while idle is False and time.monotonic() < end and not self.was_forced:
                if self._wait_server(POLL_S):
                    return
                idle = _drain_engines(engine_dirs)
        if idle is False and not self.was_forced:
            for engine_dir in engine_dirs:
                stop_engine(engine_dir, FINAL_ANSWERS_S)
        if not self._wait_server(max(end - time.monotonic(), SETTLE_S) if has_others else SETTLE_S):
            # Stubs would wait for a server that is gone.
            stubs = processes.children(self._server.pid)
            self._server.kill()
            processes.signal_all(stubs, SIGKILL)

    def end_all(self, grace_s: float) -> None:
        """End every process below this one, after the grace by SIGKILL."""
        self._begin_stop()
        processes.signal_all(self._descendants(), SIGTERM)
        end = time.monotonic() + grace_s
        while self._descendants() and time.monotonic() < end and not self.was_forced:
            self._pump(POLL_S)
            processes.reap(keep=self._server.pid)
        while left := self._descendants():
            processes.signal_all(left, SIGKILL)
            time.sleep(POLL_S / 10)
            processes.reap(keep=self._server.pid)
        self._server.wait()

    def _descendants(self) -> list[processes.Process]:
        return [process for process in processes.descendants(os.getpid()) if process.pid != self._guard]

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all(0.0 if self.was_forced else DEATH_GRACE_S if error else ENGINE_GRACE_S)
        self._selector.close()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def _find_dead_stub(self) -> processes.Process | None:
        """Return a stub that Triton did not end. Triton never reaps it, and its model answers no more."""
        now = time.monotonic()
        children = processes.children(self._server.pid)
        ended = [child for child in children if child.state == "Z" and STUB_NAME.startswith(child.name)]
        self._unreaped = {stub: self._unreaped.get(stub, now) for stub in ended}
        return next((stub for stub, since in self._unreaped.items() if now - since >= REAP_GRACE_S), None)

    def _begin_stop(self) -> None:
        """Stop watching, because an ended process would keep the selector from waiting."""
        self._phase = "stopping"
        if self._watch.fileno is not None:
            self._selector.unregister(self._watch.fileno)
        self._watch.close()

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _read_output(self) -> None:
        while True:
            try:
                data = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                if self._output in self._selector.get_map():
                    self._selector.unregister(self._output)
                return
            for line in self._log.feed(data):
                self._on_line(line, self._phase)

    def _wait_server(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self._server.poll() is None:
            if time.monotonic() >= end or self.was_forced:
                return False
            self._pump(POLL_S)
        return True

    def _exit(self) -> str:
        returncode = self._server.poll()
        if returncode is None:
            return "no exit status"
        return f"signal {-returncode}, {strsignal(-returncode)}" if returncode < 0 else f"exit code {returncode}"


def _has_other_backends(endpoints: Endpoints) -> bool:
    """Return whether models may have requests that no engine knows."""
    try:
        models = TritonHttp(endpoints.authority(endpoints.http)).models()
    except OSError:
        return True
    return any(model.backend != BACKEND for model in models)


def _drain_engines(engine_dirs: Sequence[Path]) -> bool | None:
    """Return whether no engine has a request left, or None without an answer."""
    answers = [drain(folder, DRAIN_ANSWER_S) for folder in engine_dirs]
    stats = [answer for answer in answers if answer is not None]
    return all(one.num_running + one.num_waiting == 0 for one in stats) if stats else None
