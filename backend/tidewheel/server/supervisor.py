from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import TracebackType

from tidewheel.adapter.presence import Mark, read_mark
from tidewheel.engine.folder import engine_dirs, read_status
from tidewheel.engine.launcher import RestartPolicy, stop_engine
from tidewheel.engine.operating import drain
from tidewheel.health_endpoint import DRAINING, READY, Readiness, State
from tidewheel.server import LoadError, ServeError, processes
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.launch import BACKEND
from tidewheel.server.lifeline import Lifeline
from tidewheel.server.locate import STUB_NAME
from tidewheel.server.processes import StopSignals
from tidewheel.server.revival import GiveBack, Restarts, Revivals
from tidewheel.server.server_log import LogLine, ServerLog
from tidewheel.server.server_process import ServerProcess
from tidewheel.server.triton_http import TritonHttp
from tidewheel.server.workdir import WorkDir, remove_shared_memory, shared_bytes

POLL_S = 0.1
LOOK_S = 0.5  # between two looks at all processes
REAP_GRACE_S = 2.5  # Triton reaps a stub it ends at once, and one that died while it loaded within 2 s
DEATH_GRACE_S = 2.5  # for the rest after a death
DRAIN_ANSWER_S = 1.0
FINAL_ANSWERS_S = 3.0  # for an engine to answer cut-off requests
MISSED_S = 60.0  # clients of a dead front end have gone by then
SETTLE_S = 2.0  # for Triton to send last answers and to unload idle models
ENGINE_GRACE_S = 5.0


class Supervisor:
    """Owner of tritonserver and every process below this one, which end with the `with` block.

    Any thread may read `readiness`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        signals: StopSignals,
        log: ServerLog,
        guard: Lifeline,  # is not ended with the others
        work: WorkDir,
        note: Callable[[str], None],
        on_line: Callable[[LogLine, State], None],
    ) -> None:
        self.readiness = Readiness("starting", "the server is starting")
        self.spared: set[int] = set()  # processes that outlive a restart
        self._command, self._environment = command, environment
        self._signals = signals
        self._guard = guard
        self._work = work
        self._log = log
        self._note = note
        self._on_line = on_line
        self._restarts = Restarts(RestartPolicy())
        self._served_since = 0.0
        self._revivals = Revivals(note)
        self._next_look = 0.0
        self._watched: set[tuple[int, int]] = set()  # stubs, by process id and start
        self._unreaped: dict[processes.Process, float] = {}  # ended stubs, and when they were seen first
        self._replaced: set[processes.Process] = set()  # ended stubs whose model is loaded again
        self._paused: list[str] = []  # models
        self._unloaded: deque[str] = deque()  # models that are not to be loaded again
        self.on_restart: Callable[[str], None] | None = None  # takes the reason, before all but the engines end
        self._serving: dict[processes.Process, str] = {}  # stubs and their models
        self._give_back = GiveBack(lambda pid: shared_bytes(pid, work.shm_prefix), note)
        self._num_open = 0  # requests at living front ends
        self._missed = ("", 0.0)  # death with clients that still wait, and until when it matters
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, signals.clear)
        processes.adopt_orphans()
        self._server = self._start()

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
            has_ended = self._server.has_ended()
            if has_ended:
                self._server.read_output()
            if self._log.failure is not None:
                raise LoadError(self._log.failure.model, self._log.failure.reason)
            if has_ended:
                raise ServeError(f"tritonserver ended at its start ({self._server.exit()}): {self._log.last_words()}")
            self._check_loading_stubs()
        self._served_since = time.monotonic()
        self.readiness = READY
        return True

    def watch(
        self,
        is_over: Callable[[], bool],
        reload: Callable[[str], None] | None = None,
        *,
        may_give_back: bool = False,  # while `reload` keeps the old front end until the new one serves
    ) -> None:
        """Return when asked to stop or `is_over()`. Raise `ServeError` after a death that ends all.

        `reload` starts a load of one model again, or raises OSError.
        """
        while not self.stop_requested and not is_over():
            self._pump(POLL_S)
            if self._server.has_ended():
                self._server.read_output()
                raise ServeError(f"tritonserver died ({self._server.exit()})\nIt printed last:\n{self._log.quote()}")
            if time.monotonic() < self._next_look:
                continue
            self._next_look = time.monotonic() + LOOK_S
            self._guard.keep()
            if (dead := self._find_dead_stub()) is not None:
                self._replace_stub(*dead, reload)
            if self._num_open == 0 and time.monotonic() < self._missed[1]:
                raise ServeError(f"{self._missed[0]}, and its clients wait")
            if reload is not None and may_give_back:
                self._give_back.look(self._serving, self._revivals, reload)
            self.readiness = self._judge()
            processes.reap(keep=self._server.pid)

    def restart(self, error: ServeError) -> None:
        """End and start all but the engines, unless asked to stop. Raise `CrashLoop` after too many."""
        reason = str(error).splitlines()[0]
        was_serving = self.readiness.state != "starting"
        self.readiness = Readiness("starting", reason)
        if self.on_restart is not None:
            self.on_restart(reason)
        self._kill_all_but_engines()
        self._server.close()
        remove_shared_memory(self._work.shm_prefix)
        start = time.monotonic() + self._count_death(reason, was_serving=was_serving)
        while time.monotonic() < start and not self.stop_requested:
            self._pump(POLL_S)
        if not self.stop_requested:
            self._log.failure = None
            self._unreaped, self._replaced, self._missed = {}, set(), ("", 0.0)
            self._server = self._start()

    def forget(self, model: str) -> None:
        """Cancel pending reloads of a model that was unloaded on purpose. Thread-safe."""
        self._unloaded.append(model)

    def drain(self, limit_s: float, endpoints: Endpoints) -> None:
        """Refuse new requests; let the others end, after the limit with an error.

        A connection keeps Triton from unloading models, which clients would read as an unknown model. Afterwards
        Triton would wait for every idle one, so it is ended.
        """
        self._begin_stop()
        folders = engine_dirs()
        end = time.monotonic() + limit_s
        idle = _drain_engines(folders)
        has_others = idle is None or _has_other_backends(endpoints)
        with endpoints.connect() if idle is not None else contextlib.nullcontext():
            self._server.ask_to_end()
            while idle is False and time.monotonic() < end and not self.was_forced:
                if self._wait_server(POLL_S):
                    return
                idle = _drain_engines(folders)
        if idle is False and not self.was_forced:
            for folder in folders:
                stop_engine(folder, FINAL_ANSWERS_S)
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
        self._kill(self._descendants)
        self._server.wait()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.readiness = Readiness("stopped", str(error))
        self.end_all(0.0 if self.was_forced else DEATH_GRACE_S if error else ENGINE_GRACE_S)
        self._server.close()
        self._selector.close()

    def _start(self) -> ServerProcess:
        return ServerProcess(self._command, self._environment, self._selector, self._note_output)

    def _note_output(self, data: bytes) -> None:
        for line in self._log.feed(data):
            self._on_line(line, self.readiness.state)

    def _descendants(self) -> list[processes.Process]:
        return [process for process in processes.descendants(os.getpid()) if process.pid != self._guard.pid]

    def _all_but_engines(self) -> list[processes.Process]:
        """Return the processes that end with a front end. New front ends join an engine that lives."""
        statuses = [read_status(folder) for folder in engine_dirs()]
        engines = [status.pid for status in statuses if status is not None and status.is_alive]
        kept = {*self.spared, *engines}
        kept |= {process.pid for pid in kept for process in processes.descendants(pid)}
        return [process for process in self._descendants() if process.pid not in kept]

    def _kill_all_but_engines(self) -> None:
        """End them at once: clients notice by their connections."""
        self._revivals.cancel()
        self._server.stop_watching()
        self._kill(self._all_but_engines)
        self._server.wait()

    def _kill(self, find: Callable[[], list[processes.Process]]) -> None:
        while left := find():
            processes.signal_all(left, SIGKILL)
            time.sleep(POLL_S / 10)
            processes.reap(keep=self._server.pid)

    def _check_loading_stubs(self) -> None:
        """Raise `ServeError` if one has died. Triton waits for ever for one that dies before its model is asked."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        if (dead := self._find_dead_stub()) is not None:
            raise ServeError(f"a front end died while the server started (stub process {dead[0].pid})")

    def _find_dead_stub(self) -> tuple[processes.Process, Mark | None] | None:
        """Return a stub that Triton did not end. Triton never starts it again, and its model answers no more.

        One with a mark died while it served. Without one, it loaded, was unloaded or is of a foreign backend.
        """
        now = time.monotonic()
        stubs = [child for child in processes.children(self._server.pid) if STUB_NAME.startswith(child.name)]
        for stub in stubs:
            self._watch_stub(stub)
        marks = {stub: read_mark(stub.pid, stub.started) for stub in stubs}
        self._num_open = sum(mark.num_open for stub, mark in marks.items() if mark and stub.state != "Z")
        self._serving = {stub: mark.model for stub, mark in marks.items() if mark and stub.state != "Z"}
        self._paused = [mark.model for stub, mark in marks.items() if mark and stub.state == "T"]
        self._unreaped = {stub: self._unreaped.get(stub, now) for stub in stubs if stub.state == "Z"}
        for stub, since in self._unreaped.items():
            if stub not in self._replaced and (marks[stub] is not None or now - since >= REAP_GRACE_S):
                return stub, marks[stub]
        return None

    def _watch_stub(self, stub: processes.Process) -> None:
        """Look again as soon as it ends."""
        if (stub.pid, stub.started) in self._watched:
            return
        self._watched.add((stub.pid, stub.started))
        watch = processes.Watch(stub)
        if (descriptor := watch.fileno) is None:
            return

        def end() -> None:
            self._selector.unregister(descriptor)
            watch.close()
            self._next_look = 0.0

        self._selector.register(descriptor, selectors.EVENT_READ, end)

    def _replace_stub(self, stub: processes.Process, mark: Mark | None, reload: Callable[[str], None] | None) -> None:
        """Load the model again. Raise `ServeError` if a start of all loses fewer requests.

        Triton lets clients of a dead stub wait until their connections break.
        """
        whose = f" of model {mark.model!r}" if mark is not None else ""
        reason = f"a front end{whose} died (stub process {stub.pid})"
        if reload is None or mark is None or (mark.num_open and mark.num_open >= self._num_open):
            raise ServeError(reason)
        self._replaced.add(stub)
        if mark.num_open:
            self._missed = (reason, time.monotonic() + MISSED_S)
        self._note(f"{reason}; loading the model again")
        self._revivals.start(mark.model, reload, self._count_death(reason, was_serving=True))

    def _judge(self) -> Readiness:
        while self._unloaded:
            self._revivals.cancel(self._unloaded.popleft())
        if model := self._revivals.look():
            return Readiness("reloading", f"{model}: its front end died")
        if self._paused:
            return Readiness("hung", f"{self._paused[0]}: its front end is paused")
        return READY

    def _count_death(self, reason: str, *, was_serving: bool) -> float:
        """Return the delay of the next start."""
        now = time.monotonic()
        served_s = now - self._served_since if was_serving else 0.0
        self._served_since = now
        return self._restarts.next_delay_s(served_s, reason)

    def _begin_stop(self) -> None:
        """Stop watching, because an ended process would keep the selector from waiting."""
        if self.readiness.state != "stopped":
            self.readiness = DRAINING
        self._revivals.cancel()
        self._server.stop_watching()

    def _pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _wait_server(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not self._server.has_ended():
            if time.monotonic() >= end or self.was_forced:
                return False
            self._pump(POLL_S)
        return True


def _has_other_backends(endpoints: Endpoints) -> bool:
    """Return whether models may have requests that no engine knows."""
    try:
        models = TritonHttp(endpoints.authority(endpoints.http)).models()
    except OSError:
        return True
    return any(model.backend != BACKEND for model in models)


def _drain_engines(engine_dirs: Sequence[Path]) -> bool | None:
    """Return whether no engine has a request left, or None without an engine. A silent one may be in a long step."""
    answers = [drain(folder, DRAIN_ANSWER_S) for folder in engine_dirs if _serves(folder)]
    idle = [answer is not None and answer.num_running + answer.num_waiting == 0 for answer in answers]
    return all(idle) if idle else None


def _serves(engine_dir: Path) -> bool:
    status = read_status(engine_dir)
    return status is not None and status.state == "ready" and status.is_alive
