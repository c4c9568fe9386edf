import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

import psutil

from tidewheel.adapter.stub_process import PresenceMark, read_mark
from tidewheel.engine.connection import drain_all
from tidewheel.engine.folder import engine_dirs, read_status
from tidewheel.engine.launcher import stop_engine
from tidewheel.health_endpoint import DRAINING, READY, Readiness
from tidewheel.server import ServeError
from tidewheel.server.console import Console
from tidewheel.server.endpoints import Endpoints, TritonHttp
from tidewheel.server.model_reloads import Load, PendingReloads, SharedMemoryRelief, StubId
from tidewheel.server.server_log import ServerLog
from tidewheel.server.tritonserver import BACKEND, STUB_NAME
from tidewheel.server.workdir import WorkDir, remove_shared_memory, shared_bytes
from tidewheel_process import process_tree
from tidewheel_process.child import Child, DeathCount, Guard, start_ticks
from tidewheel_process.current_process import StopSignals, adopt_orphans

POLL_S = 0.1
LOOK_S = 0.5
REAP_GRACE_S = 2.5  # Triton reaps stubs that it ends at once, others while it loads within 2 s
DEATH_GRACE_S = 2.5  # for the rest after a death
DRAIN_ANSWER_S = 1.0
FINAL_ANSWERS_S = 3.0  # for answers to cut-off requests
MISSED_S = 60.0  # until clients of a dead front end have gone
SETTLE_S = 2.0  # for Triton's last answers and unloads
ENGINE_GRACE_S = 5.0
_READ_BYTES = 1 << 16


class ServerPlan(NamedTuple):
    """Server to run: tritonserver, and what is known of it before it runs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    endpoints: Endpoints
    engines: Mapping[str, Path]  # folders by model name
    origin: str  # of tritonserver, in words
    load: Load | None = None  # loads a model again; None: impossible
    may_give_back: bool = False  # `load` keeps the old front end meanwhile


@dataclass(kw_only=True, eq=False)
class Supervisor(contextlib.AbstractContextManager["Supervisor"]):
    """Starter and watcher of tritonserver, front ends and engines; leaving the `with` block ends them.

    Any thread may read `readiness`.
    """

    plan: ServerPlan
    signals: StopSignals
    log: ServerLog
    guard: Guard  # outlives the other processes
    work: WorkDir
    console: Console

    def __post_init__(self) -> None:
        self.readiness = Readiness("starting", "the server is starting")
        self.spared: Callable[[], set[int]] = set  # process ids that outlive a restart
        self.on_restart: Callable[[str], object] = lambda reason: None  # noqa: ARG005
        self._deaths = DeathCount()
        self._served_since = 0.0
        self.reloads = PendingReloads(self.console.note)
        self._relief = SharedMemoryRelief(lambda pid: shared_bytes(pid, self.work.shm_prefix), self.console.note)
        self._stubs = StubWatch()
        self._next_look = 0.0
        self._missed = ("", 0.0)  # death with waiting clients, and its end
        adopt_orphans()
        self._server = self._start()

    @property
    def stop_requested(self) -> bool:
        return self.signals.count > 0

    @property
    def was_forced(self) -> bool:
        return self.signals.count > 1

    def wait_ready(self, is_ready: Callable[[], bool], on_tick: Callable[[], None]) -> bool:
        """Wait for the server. Return False if a stop came first. Raise `ServeError` if the server ended."""
        while not is_ready():
            self._pump(POLL_S)
            on_tick()
            if self.stop_requested:
                return False
            has_ended = self._server.has_ended
            if has_ended:
                self._read_output()
            if self.log.failure is not None:
                raise self.log.failure
            if has_ended:
                raise ServeError(f"tritonserver ended at its start ({self._server.exit}): {self.log.last_words()}")
            # Triton waits for ever for a stub that dies early.
            if self._must_look() and (dead := self._stubs.look(self._server.pid)) is not None:
                raise ServeError(f"a front end died while the server started (stub process {dead[0].pid})")
        self._served_since = time.monotonic()
        self.readiness = READY
        return True

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Watch the processes until a stop or `is_over()`. Raise `ServeError` after a death that needs a restart."""
        while not self.stop_requested and not is_over():
            self._pump(POLL_S)
            if self._server.has_ended:
                self._read_output()
                raise ServeError(f"tritonserver died ({self._server.exit})\nIt printed last:\n{self.log.quote()}")
            if not self._must_look():
                continue
            self.guard.keep()
            if (dead := self._stubs.look(self._server.pid)) is not None:
                self._replace_stub(*dead)
            if self._stubs.num_open == 0 and time.monotonic() < self._missed[1]:
                raise ServeError(f"{self._missed[0]}, and its clients wait")
            if self.plan.load is not None and self.plan.may_give_back:
                self._relief.look(self._stubs.serving, self.reloads, self.plan.load)
            if model := self.reloads.look(self._stubs.serving):
                self.readiness = Readiness("reloading", f"{model}: its front end died")
            elif self._stubs.paused:
                self.readiness = Readiness("hung", f"{self._stubs.paused[0]}: its front end is paused")
            else:
                self.readiness = READY
            process_tree.reap(keep=[self._server.pid, *self.spared()])

    def restart(self, error: ServeError) -> None:
        """Restart all processes but the engines, unless a stop was requested. Raise `CrashLoop`."""
        reason = str(error).splitlines()[0]
        was_serving = self.readiness.state != "starting"
        self.readiness = Readiness("starting", reason)
        self.on_restart(reason)
        self.reloads.cancel()
        self._kill(self._all_but_engines)  # at once: clients notice by their connections
        self._forget_server()
        remove_shared_memory(self.work.shm_prefix)
        delay_s = self._count_death(reason, was_serving=was_serving)
        if not self._pump_until(lambda: self.stop_requested, delay_s):
            self.log.failure = None
            self._stubs, self._missed = StubWatch(), ("", 0.0)
            self._server = self._start()

    def drain(self, limit_s: float) -> None:
        """Refuse new requests and wait for running ones; after `limit_s`, end them with an error."""
        self._begin_stop()
        folders, triton = engine_dirs(), self.plan.endpoints.triton
        end = time.monotonic() + limit_s
        num_left = drain_all(folders, DRAIN_ANSWER_S)  # a silent engine may be in a long step
        has_others = num_left is None or _has_other_backends(triton)
        # An open connection keeps Triton from unloading models, which clients would then read as unknown.
        with contextlib.nullcontext() if num_left is None else contextlib.closing(triton.connect()):
            self._server.terminate()
            while num_left and time.monotonic() < end and not self.was_forced:
                if self._wait_server(POLL_S):
                    return
                num_left = drain_all(folders, DRAIN_ANSWER_S)
        if num_left and not self.was_forced:
            for folder in folders:
                stop_engine(folder, FINAL_ANSWERS_S)
        if not self._wait_server(max(end - time.monotonic(), SETTLE_S) if has_others else SETTLE_S):
            # Triton waits for idle connections, and stubs for a server that is gone.
            stubs = process_tree.children(self._server.pid)
            self._server.kill()
            process_tree.signal_all(stubs, SIGKILL)

    def end_all(self, grace_s: float) -> None:
        self._begin_stop()
        process_tree.signal_all(self._descendants(), SIGTERM)
        self._pump_until(lambda: not self._descendants(), grace_s)
        self._kill(self._descendants)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.readiness = Readiness("stopped", str(error))
        self.end_all(0.0 if self.was_forced else DEATH_GRACE_S if error else ENGINE_GRACE_S)
        self._forget_server()

    def _start(self) -> Child:
        pipe, merged = subprocess.PIPE, subprocess.STDOUT
        server = Child(self.plan.command, env=dict(self.plan.environment), stdout=pipe, stderr=merged)
        os.set_blocking(server.stdout.fileno(), False)
        return server

    def _read_output(self) -> None:
        output = self._server.stdout
        with contextlib.suppress(BlockingIOError):
            while not output.closed and (data := os.read(output.fileno(), _READ_BYTES)):
                for line in self.log.feed(data):
                    self.console.server_line(line, self.readiness.state)
            output.close()

    def _forget_server(self) -> None:
        self._server.wait()
        self._read_output()
        self._server.stdout.close()

    def _descendants(self) -> list[psutil.Process]:
        process_tree.reap(keep=[self._server.pid, *self.spared()])
        return [process for process in process_tree.descendants(os.getpid()) if process.pid != self.guard.pid]

    def _all_but_engines(self) -> list[psutil.Process]:
        statuses = [read_status(folder) for folder in engine_dirs()]
        kept = self.spared() | {status.pid for status in statuses if status is not None and status.is_alive}
        kept |= {process.pid for pid in kept for process in process_tree.descendants(pid)}
        return [process for process in self._descendants() if process.pid not in kept]

    def _kill(self, find: Callable[[], list[psutil.Process]]) -> None:
        while left := find():
            process_tree.signal_all(left, SIGKILL)
            time.sleep(POLL_S / 10)
        self._server.wait()

    def _must_look(self) -> bool:
        now = time.monotonic()
        if now < self._next_look and not self._stubs.has_one_ended:
            return False
        self._next_look = now + LOOK_S
        return True

    def _replace_stub(self, stub: StubId, mark: PresenceMark | None) -> None:
        """Load a dead front end's model again. Raise `ServeError` if a full restart loses fewer requests."""
        # Triton lets clients of a dead stub wait until their connections break.
        whose = f" of model {mark.model!r}" if mark is not None else ""
        reason = f"a front end{whose} died (stub process {stub.pid})"
        if self.plan.load is None or mark is None or (mark.num_open and mark.num_open >= self._stubs.num_open):
            raise ServeError(reason)
        self._stubs.replaced.add(stub)
        if mark.num_open:
            self._missed = (reason, time.monotonic() + MISSED_S)
        self.console.note(f"{reason}; loading the model again")
        delay_s = self._count_death(reason, was_serving=True)
        self.reloads.start(mark.model, self._stubs.serving, self.plan.load, delay_s)

    def _count_death(self, reason: str, *, was_serving: bool) -> float:
        now = time.monotonic()
        served_s = now - self._served_since if was_serving else 0.0
        self._served_since = now
        return self._deaths.next_delay_s(served_s, reason)

    def _begin_stop(self) -> None:
        if self.readiness.state != "stopped":
            self.readiness = DRAINING
        self.reloads.cancel()

    def _pump(self, timeout_s: float) -> None:
        if self._server.stdout.closed:
            time.sleep(timeout_s)
        elif select.select([self._server.stdout], [], [], timeout_s)[0]:
            self._read_output()

    def _wait_server(self, limit_s: float) -> bool:
        return self._pump_until(lambda: self._server.has_ended, limit_s)

    def _pump_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() >= end or self.was_forced:
                return False
            self._pump(POLL_S)
        return True


class StubWatch:
    def __init__(self) -> None:
        self.num_open = 0  # requests of living front ends
        self.serving: dict[StubId, str] = {}  # models of living front ends
        self.paused: list[str] = []  # models
        self.replaced: set[StubId] = set()  # ended stubs with a reload
        self._unreaped: dict[StubId, float] = {}  # ended stubs and the time of the first look
        self._living: list[StubId] = []

    @property
    def has_one_ended(self) -> bool:
        return any(start_ticks(stub.pid) != stub.start_ticks for stub in self._living)

    def look(self, server_pid: int) -> tuple[StubId, PresenceMark | None] | None:
        """Return a dead stub (Triton restarts none) and its mark (None: it never served); None if all live."""
        now = time.monotonic()
        statuses = _stubs(server_pid)
        marks = {stub: read_mark(*stub) for stub in statuses}
        ended = [stub for stub, status in statuses.items() if status == psutil.STATUS_ZOMBIE]
        self._living = [stub for stub in statuses if stub not in ended]
        # A stub without a mark loaded, was unloaded or is of a foreign backend.
        serving = {stub: mark for stub in self._living if (mark := marks[stub]) is not None}
        self.num_open = sum(mark.num_open for mark in serving.values())
        self.serving = {stub: mark.model for stub, mark in serving.items()}
        self.paused = [mark.model for stub, mark in serving.items() if statuses[stub] == psutil.STATUS_STOPPED]
        self._unreaped = {stub: self._unreaped.get(stub, now) for stub in ended}
        for stub, since in self._unreaped.items():
            if stub not in self.replaced and (marks[stub] is not None or now - since >= REAP_GRACE_S):
                return stub, marks[stub]
        return None


def _stubs(server_pid: int) -> dict[StubId, str]:
    found = {}
    for child in process_tree.children(server_pid):
        name, ticks = process_tree.name(child), start_ticks(child.pid, or_zombie=True)
        if name and STUB_NAME.startswith(name) and ticks is not None:
            found[StubId(child.pid, ticks)] = process_tree.status(child)
    return found


def _has_other_backends(triton: TritonHttp) -> bool:
    with contextlib.suppress(OSError):
        return any(model.backend != BACKEND for model in triton.models())
    return True
