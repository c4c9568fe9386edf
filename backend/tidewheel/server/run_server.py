import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Literal

import msgspec

from tidewheel.adapter.repository_entry import real_entry
from tidewheel.engine.folder import CURRENT, current_engines, devices_of_ranks, engine_dir, label_of, read_status
from tidewheel.engine.heartbeat import EngineWatch
from tidewheel.engine.launcher import FAULTS_ALLOWED
from tidewheel.gateway.gateway_options import Address, StandaloneOptions
from tidewheel.health_endpoint import READY, HealthEndpoint, Readiness
from tidewheel.private_dir import unwritable, write_value
from tidewheel.server import ServeError, model_control, repository, tritonserver, workdir
from tidewheel.server.console import Console, LoadProgress, describe_endpoints, describe_models, version_warning
from tidewheel.server.endpoints import Endpoints, TritonHttp, check_keys
from tidewheel.server.model_control import ControlSocket, ModelControl
from tidewheel.server.model_reloads import Load
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import ServerPlan, Supervisor
from tidewheel.server.tritonserver import GOOD_DESCRIPTORS, MANY_DESCRIPTORS, ClosedApi, ControlMode, TritonInstall
from tidewheel.server.workdir import WorkDir
from tidewheel_process.child import Child, CrashLoop, RestartedChild, StartError
from tidewheel_process.current_process import StopSignals, call_at_end_of, raise_descriptor_limit

_POLL_S = 1
_STDIN = 0
_MODELS_API: Literal["model-repository"] = "model-repository"
_OWN_CONTROL = ("--model-control", "--model-repo", "--model-store", "--load-model", "--repository-poll")
FORCED_EXIT = 130  # a shell's code for Ctrl-C
_GATEWAY_START_S = 30.0
_GATEWAY_DRAIN_S = 1.0  # for the last bytes of answers
_LOOK_S = 0.2  # between two looks at the engines
_ASK_S = 1.0  # between two requests to tritonserver
_STARTING = Readiness("starting", "the server loads its models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `tidewheel serve`, with either `model_repository` or `model`."""

    model_repository: Path | None = None
    models: tuple[str, ...] = ()  # entries to serve (`explicit`: to load first); empty: all
    model: str | None = None  # folder or Hugging Face id
    model_name: str = ""  # empty: last part of `model`
    settings: Mapping[str, str]
    endpoints: Endpoints
    gateway: StandaloneOptions = field(default_factory=StandaloneOptions)  # without address and upstreams
    drain_s: float = 30.0
    restart: bool = True  # after a death; beside a session, of a front end alone
    model_control: ControlMode = "none"
    open_apis: Sequence[ClosedApi] = ()  # `model-repository` with `explicit` alone
    repository_poll_s: int | None = None  # with `poll`; None: Triton's 15
    tritonserver: str | None = None
    triton_arguments: Sequence[str] = ()
    log_file: Path | None = None
    ports_file: Path | None = None
    end_with_stdin: bool = False
    allow_faults: bool = False
    verbose: bool = False

    @property
    def is_closed(self) -> bool:
        """Return whether Triton gets a private repository: clients must not load models."""
        return not (
            self.model_control == "poll"
            or _MODELS_API in self.open_apis
            or any(argument.startswith(_OWN_CONTROL) for argument in self.triton_arguments)
        )

    @property
    def opened_apis(self) -> set[ClosedApi]:
        """Triton's APIs that clients may use without the secret header."""
        # Without explicit model control, Triton itself refuses loads, and the API only lists models.
        is_explicit = any("explicit" in argument for argument in self.triton_arguments)
        return {*self.open_apis, *(() if is_explicit else (_MODELS_API,))}

    @property
    def warnings(self) -> list[str]:
        dangers = {
            "shared-memory": "all that reach the ports, other users of the machine included, read and change the "
            "requests of others",
            _MODELS_API: f"all that reach {self.endpoints.host} run code as this user: other users of the machine, "
            "and every web page that a browser on it opens",
        }
        opened = (api for api in dangers if api in self.open_apis)
        return [f"--open-api {api} lets {dangers[api]} (docs/proxy.md)" for api in opened]

    def source(self, work: WorkDir) -> Path:
        """Return the operator's repository, or the repository made for `--model`."""
        return (self.model_repository or work.written).expanduser().resolve()


def serve(options: ServeOptions, session: Callable[[Endpoints], None] | None = None) -> int:
    """Run until a stop, or until `session`, run beside the ready server, ends; return the exit code.

    Raise `ServeError`, `ConfigError` or `CrashLoop`. No process is left.
    """
    if options.endpoints.openai is not None:
        check_keys(options.endpoints.host, options.gateway.api_keys)
    console = Console(verbose=options.verbose)
    install = tritonserver.locate(options.tritonserver)
    with (
        StopSignals() as signals,
        workdir.work_dir() as work,
        workdir.guarded(work.root) as guard,
        _log_file(options.log_file) as log_file,
    ):
        if options.end_with_stdin:
            call_at_end_of(_STDIN, signals.stop)
        plan = _prepare(options, install, work)
        if (limit := raise_descriptor_limit()) < GOOD_DESCRIPTORS:
            console.note(
                f"warning: {limit} open files are allowed, one for each connection, and clients beyond wait without "
                f"an answer: allow {GOOD_DESCRIPTORS} or more (ulimit -Hn)"
            )
        console.note(f"starting tritonserver ({install.origin})")
        with (
            workdir.ports_file(options.ports_file, plan.endpoints),
            HealthMonitor(plan.endpoints, plan.endpoints.triton.is_live) as health,
            Supervisor(
                plan=plan, signals=signals, log=ServerLog(log_file), guard=guard, work=work, console=console
            ) as supervisor,
            _model_control(options, supervisor),
            _gateway(options, supervisor) as gateway,
        ):
            _Server(options, plan, console, supervisor, health, gateway).run(session)
        return FORCED_EXIT if supervisor.was_forced else 0


def _prepare(options: ServeOptions, install: TritonInstall, work: WorkDir) -> ServerPlan:
    try:
        models = _repository(options, work)
        names = repository.entries(models)
        endpoints = options.endpoints.chosen()
        write_value(work.endpoints_file, endpoints)
        control, load = _control(options, models, endpoints)
        tritonserver.assemble(install, work.backends)
        faults = {FAULTS_ALLOWED: "1"} if options.allow_faults else {}
        environment = tritonserver.environment(install, work) | faults
        command = tritonserver.command(
            install,
            models,
            endpoints,
            work,
            drain_s=options.drain_s,
            flags=tritonserver.known_flags(install, environment),
            opened=options.opened_apis,
            extra=[*control, *options.triton_arguments],
        )
        # Front ends identify their repository by an entry's real path.
        engines = {name: engine_dir(real_entry(models / name).parent, name) / CURRENT for name in names}
    except OSError as error:
        path = error.filename2 or error.filename  # none: a write
        if path is None or Path(path).is_relative_to(work.root):
            raise unwritable(work.root.parent, error) from None
        raise ServeError(f"{path} cannot be read: {error.strerror}") from None
    load = load if options.restart else None
    return ServerPlan(command, environment, endpoints, engines, install.origin, load, may_give_back=options.is_closed)


def _repository(options: ServeOptions, work: WorkDir) -> Path:
    source = options.source(work)
    if options.model_repository is None:
        model = options.model or ""
        name = options.model_name or repository.served_name(model)
        repository.write_entry(source, model, repository.check_name(name), options.settings)
    if options.is_closed:
        return repository.mirror(source, options.models, work.repository)
    if options.model_control == "explicit":
        repository.check_names(source, options.models)
        return source
    return repository.select(source, options.models, work.repository) if options.models else source


def _control(options: ServeOptions, models: Path, endpoints: Endpoints) -> tuple[list[str], Load | None]:
    """Return Triton's model control flags and a reloader. Raise `ServeError`."""
    if not options.is_closed:
        flags = tritonserver.control_flags(options.model_control, options.models, options.repository_poll_s)
        reload = partial(model_control.reload, endpoints.authority(endpoints.grpc))
        return flags, reload if options.model_control == "explicit" else None
    # Without a free descriptor, a polling Triton unloads the models that it cannot see.
    if (limit := raise_descriptor_limit()) >= MANY_DESCRIPTORS:
        return tritonserver.control_flags("poll", (), _POLL_S), lambda name: repository.load_again(models / name)
    if options.model_control == "explicit":
        raise ServeError(
            f"--model-control explicit needs {MANY_DESCRIPTORS} open files, and {limit} are allowed: allow more "
            "(ulimit -Hn)"
        )
    return tritonserver.control_flags("none"), None


def _model_control(options: ServeOptions, supervisor: Supervisor) -> contextlib.AbstractContextManager[object]:
    if options.model_control != "explicit" or not options.is_closed:
        return contextlib.nullcontext()
    work, triton = supervisor.work, supervisor.plan.endpoints.triton
    control = ModelControl(options.source(work), work.repository, supervisor, triton.serves)
    supervisor.log.on_load = control.note_load
    supervisor.on_restart = control.note_restart
    return ControlSocket(work.control, control.handle)


def _log_file(path: Path | None) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    try:
        return contextlib.nullcontext() if path is None else path.open("wb", buffering=0)
    except OSError as error:
        raise ServeError(f"--log-file {str(path)!r} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _gateway(options: ServeOptions, supervisor: Supervisor) -> Iterator[RestartedChild | None]:
    endpoints = supervisor.plan.endpoints
    if endpoints.openai is None:
        yield None
        return
    command = msgspec.structs.replace(
        options.gateway,
        host=endpoints.host,
        port=endpoints.openai,
        upstreams=(Address(**endpoints.authorities),),
        drain_s=_GATEWAY_DRAIN_S,
    ).command
    gateway = RestartedChild(
        "the gateway", lambda: Child(command, stdout=subprocess.DEVNULL), supervisor.console.note
    )
    supervisor.spared = lambda: {gateway.child.pid}
    try:
        yield gateway
    finally:
        gateway.child.end(2 * _GATEWAY_DRAIN_S)


class HealthMonitor:
    """Health endpoint of `tidewheel serve`, with threads that watch engines and tritonserver."""

    def __init__(self, endpoints: Endpoints, is_live: Callable[[], bool]) -> None:
        """Raise `ServeError` if the port is taken."""
        self.server: Callable[[], Readiness] = lambda: _STARTING  # engines count when it is READY
        self._is_live = is_live
        self._watches: dict[Path, EngineWatch] = {}
        self._seen = {"engines": READY, "tritonserver": READY}
        self._stopped = threading.Event()
        try:
            self._endpoint = HealthEndpoint(endpoints.host, endpoints.health, self.report, devices_of_ranks)
        except OSError as error:
            raise ServeError(f"cannot listen on port {endpoints.health} (--health-port): {error.strerror}") from None
        self._threads = [
            threading.Thread(target=self._repeat, args=arguments, daemon=True)
            for arguments in (("engines", self.look, _LOOK_S), ("tritonserver", self.ask, _ASK_S))
        ]

    def report(self) -> Readiness:
        return next((one for one in (self.server(), *self._seen.values()) if not one.is_ready), READY)

    def raise_if_given_up(self) -> None:
        engines = self._seen["engines"]
        if not engines.is_live:
            raise CrashLoop(f"an engine is given up: {engines.reason}")

    def look(self) -> Readiness:
        """Return the worst readiness of all engines."""
        self._watches = {link: self._watches.get(link) or EngineWatch(link) for link in current_engines()}
        seen = [(label_of(link), watch.look()) for link, watch in self._watches.items()]
        bad = [Readiness(one.state, f"{label}: {one.reason}") for label, one in seen if one and not one.is_ready]
        return min(bad, key=lambda one: one.is_live, default=READY)

    def ask(self) -> Readiness:
        is_silent = self.server().is_ready and not self._is_live()
        return Readiness("stopped", "tritonserver does not answer") if is_silent else READY

    def _repeat(self, name: str, judge: Callable[[], Readiness], interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            try:
                self._seen[name] = judge()
            except Exception as error:  # unknown is not ready
                self._seen[name] = Readiness("stopped", f"{name} cannot be examined: {error}")

    def __enter__(self) -> "HealthMonitor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._threads[0].join()  # it must not outlive the run folder
        self._endpoint.close()


@dataclass(frozen=True, slots=True)
class _Server:
    options: ServeOptions
    plan: ServerPlan
    console: Console
    supervisor: Supervisor
    health: HealthMonitor
    gateway: RestartedChild | None

    def run(self, session: Callable[[Endpoints], None] | None) -> None:
        for warning in self.options.warnings:
            self.console.note(f"warning: {warning}")
        self.health.server = lambda: self.supervisor.readiness
        if not self._wait_ready():
            return
        self._wait_gateway()
        self._describe(with_endpoints=session is None)
        if session is None:
            self._stay()
        else:
            guest = threading.Thread(target=session, args=(self.plan.endpoints,), daemon=True)
            guest.start()
            self.supervisor.watch(lambda: self._tend() or not guest.is_alive())
        farewell = "stopping"
        if self.supervisor.stop_requested:
            farewell += f": running requests have {self.options.drain_s:g} s to end (Ctrl-C again ends them now)"
        self.console.note(farewell)
        self.supervisor.drain(self.options.drain_s)

    def _stay(self) -> None:
        died_at = 0.0
        while not self.supervisor.stop_requested:
            try:
                if self.supervisor.readiness.state == "starting" and self._wait_ready():
                    self.console.note(f"ready again after {time.monotonic() - died_at:.1f} s")
                self.supervisor.watch(self._tend)
            except ServeError as error:
                if not self.options.restart:
                    raise
                self.console.note(f"{error}\ntidewheel: starting the server again")
                died_at = time.monotonic()
                self.supervisor.restart(error)

    def _tend(self) -> bool:
        self.health.raise_if_given_up()
        if self.gateway is not None:
            self.gateway.watch()
        return False

    def _wait_ready(self) -> bool:
        with contextlib.closing(LoadProgress(self.plan.engines)) as progress:
            return self.supervisor.wait_ready(self.plan.endpoints.triton.is_ready, progress.look)

    def _wait_gateway(self) -> None:
        if self.gateway is None:
            return
        endpoints = self.plan.endpoints
        http = TritonHttp(endpoints.authority(endpoints.openai or 0))
        try:
            self.gateway.child.wait_ready(lambda: http.holds("/health"), _GATEWAY_START_S)
        except StartError as error:
            raise ServeError(f"the gateway {error}") from None

    def _describe(self, *, with_endpoints: bool) -> None:
        console, plan, version = self.console, self.plan, self.supervisor.log.version
        try:
            models = plan.endpoints.triton.models()
        except OSError as error:
            models = []
            console.note(f"warning: the server is ready and does not list its models: {error}")
        statuses = {name: read_status(folder) for name, folder in plan.engines.items()}
        infos = {name: status.info for name, status in statuses.items() if status is not None and status.info}
        if warning := version_warning(version, plan.endpoints.host):
            console.note(f"warning: {warning}")
        console.report(describe_models(version, plan.origin, models, infos))
        if with_endpoints:
            texts = [model for model in models if model.name not in infos or infos[model.name].takes_text]
            console.report(describe_endpoints(plan.endpoints, texts, has_playground=self.options.gateway.playground))
