from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tidewheel.adapter.repository_entry import real_entry
from tidewheel.engine.folder import CURRENT, engine_dir, read_status
from tidewheel.engine.launcher import FAULTS_ALLOWED
from tidewheel.private_dir import unwritable
from tidewheel.server import CrashLoop, ServeError, launch, model_control, own_servers, processes, repository
from tidewheel.server.console import Console, LoadProgress, describe_endpoints, describe_models, version_warning
from tidewheel.server.endpoints import Endpoints, check_keys, is_loopback
from tidewheel.server.gateway_process import GatewayProcess
from tidewheel.server.health import Health
from tidewheel.server.lifeline import Lifeline, stop_with_parent
from tidewheel.server.locate import TritonInstall, locate
from tidewheel.server.processes import StopSignals
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import Supervisor
from tidewheel.server.triton_http import DeployedModel, TritonHttp
from tidewheel.server.workdir import WorkDir, work_dir

_POLL_S = 1
_STDIN = 0
_OWN_CONTROL = ("--model-control", "--model-repo", "--model-store", "--load-model", "--repository-poll")
FORCED_EXIT = 130  # a shell's code for Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options, with either `model_repository` or `model`."""

    model_repository: Path | None = None
    models: tuple[str, ...] = ()  # entries to serve, or to load first with `explicit`; empty: all
    model: str | None = None  # folder or Hugging Face id
    model_name: str = ""  # empty: last part of `model`
    settings: Mapping[str, str]
    endpoints: Endpoints
    api_keys: Path | None = None  # of the gateway
    gateway_arguments: tuple[str, ...] = ()  # its other options
    drain_s: float = 30.0
    restart: bool = True  # after a death, without a session
    model_control: launch.ModelControl = "none"
    open_apis: tuple[launch.ClosedApi, ...] = ()
    repository_poll_s: int | None = None  # with `poll`; None: Triton's 15
    tritonserver: str | None = None
    triton_arguments: tuple[str, ...] = ()
    log_file: Path | None = None
    ports_file: Path | None = None  # reports the endpoints
    end_with_stdin: bool = False
    allow_faults: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    install: TritonInstall
    command: tuple[str, ...]
    environment: Mapping[str, str]
    endpoints: Endpoints
    engines: Mapping[str, Path]  # model name → folder of the engine that serves
    reload: Callable[[str], None] | None  # loads one model again, where that is possible


def serve(options: ServeOptions, session: Callable[[Endpoints], None] | None = None) -> int:
    """Run until asked to stop, or until `session`, run beside the ready server, ends; return the exit code.

    Raise `ServeError` or `ConfigError` if the server cannot start, or dies and is not to start again. No process is
    left.
    """
    if options.endpoints.openai is not None:
        check_keys(options.endpoints.host, options.api_keys)
    console = Console(verbose=options.verbose)
    install = locate(options.tritonserver)
    with (
        StopSignals() as signals,
        work_dir() as work,
        Lifeline(work) as lifeline,
        _server_log(options.log_file) as log,
    ):
        if options.end_with_stdin:
            stop_with_parent(_STDIN, signals.stop)
        try:
            plan = _prepare(options, install, work)
        except OSError as error:
            raise _unprepared(error, work) from None
        if warning := _descriptor_warning():
            console.note(f"warning: {warning}")
        console.note(f"starting tritonserver ({install.origin})")
        triton = TritonHttp(plan.endpoints.authority(plan.endpoints.http))
        with (
            own_servers.reported(options.ports_file, plan.endpoints),
            Health(plan.endpoints, triton.is_live) as health,
            Supervisor(
                plan.command,
                plan.environment,
                signals=signals,
                log=log,
                guard=lifeline,
                work=work,
                note=console.note,
                on_line=console.server_line,
            ) as supervisor,
            _gateway(options, plan.endpoints, supervisor, console) as gateway,
        ):
            for warning in open_warnings(options):
                console.note(f"warning: {warning}")
            health.server = lambda: supervisor.readiness
            if _wait_ready(supervisor, plan):
                if gateway is not None:
                    gateway.wait_ready()
                _announce(console, plan, log.version)
                if session is None:
                    _describe_endpoints(console, plan, options)
                _stay(supervisor, plan, console, health, gateway, session, options)
                console.note(_farewell(supervisor, options.drain_s))
                supervisor.drain(options.drain_s, plan.endpoints)
        return FORCED_EXIT if supervisor.was_forced else 0


def _prepare(options: ServeOptions, install: TritonInstall, work: WorkDir) -> _Plan:
    models = _repository(options, work)
    names = repository.entries(models)
    endpoints = options.endpoints.chosen()
    own_servers.announce(work, endpoints)
    launch.assemble(install, work.backends)
    environment = launch.environment(install, work) | ({FAULTS_ALLOWED: "1"} if options.allow_faults else {})
    command = launch.command(
        install,
        models,
        endpoints,
        work,
        drain_s=options.drain_s,
        flags=launch.known_flags(install, environment),
        control=_control_flags(options),
        opened=options.open_apis,
        extra=options.triton_arguments,
    )
    return _Plan(
        install=install,
        command=tuple(command),
        environment=environment,
        endpoints=endpoints,
        # Front ends identify their repository by an entry's real path.
        engines={name: engine_dir(real_entry(models / name).parent, name) / CURRENT for name in names},
        reload=_reload(options, models, endpoints),
    )


def _unprepared(error: OSError, work: WorkDir) -> Exception:
    path = error.filename2 or error.filename  # none: a write
    if path is None or Path(path).is_relative_to(work.root):
        return unwritable(work.root.parent, error)
    return ServeError(f"{path} cannot be read: {error.strerror}")


def _is_closed(options: ServeOptions) -> bool:
    """Return whether no client may have models loaded, so that `serve` makes a private repository."""
    return options.model_control == "none" and not any(
        argument.startswith(_OWN_CONTROL) for argument in options.triton_arguments
    )


def _is_polled(options: ServeOptions) -> bool:
    """Return whether Triton polls that repository. Without a free descriptor it would unload what it cannot see."""
    return _is_closed(options) and processes.raise_descriptor_limit() >= processes.MANY_DESCRIPTORS


def _control_flags(options: ServeOptions) -> list[str]:
    if _is_polled(options):
        return launch.control_flags("poll", (), _POLL_S)
    return launch.control_flags(options.model_control, options.models, options.repository_poll_s)


def _reload(options: ServeOptions, models: Path, endpoints: Endpoints) -> Callable[[str], None] | None:
    if not options.restart:
        return None
    if _is_polled(options):
        return lambda name: repository.load_again(models / name)
    if options.model_control == "explicit":
        return partial(model_control.reload, endpoints.authority(endpoints.grpc))
    return None


def _descriptor_warning() -> str:
    limit = processes.raise_descriptor_limit()
    if limit >= processes.GOOD_DESCRIPTORS:
        return ""
    return (
        f"{limit} open files are allowed, one for each connection, and clients beyond wait without an answer: "
        f"allow {processes.GOOD_DESCRIPTORS} or more (ulimit -Hn)"
    )


def open_warnings(options: ServeOptions) -> list[str]:
    """Return what those can do who reach the APIs that are open."""
    warnings = []
    if "shared-memory" in options.open_apis:
        warnings.append(
            "--open-api shared-memory lets all that reach the ports, other users of the machine included, read and "
            "change the requests of others (docs/proxy.md)"
        )
    if options.model_control == "explicit" and not is_loopback(options.endpoints.host):
        warnings.append(
            f"--model-control explicit lets all that reach {options.endpoints.host} load models, and with them code: "
            "leave --host at 127.0.0.1, or close the API (docs/serve.md)"
        )
    return warnings


def _repository(options: ServeOptions, work: WorkDir) -> Path:
    if options.model_repository is not None:
        folder = options.model_repository.expanduser().resolve()
        if options.model_control == "explicit":
            repository.check_names(folder, options.models)
            return folder
        if _is_closed(options):
            return repository.mirror(folder, options.models, work.repository)
        return repository.select(folder, options.models, work.repository) if options.models else folder
    model = options.model or ""
    name = options.model_name or repository.served_name(model)
    repository.write_entry(work.repository, model, repository.check_name(name), options.settings)
    return work.repository.resolve()


@contextlib.contextmanager
def _server_log(path: Path | None) -> Iterator[ServerLog]:
    if path is None:
        yield ServerLog()
        return
    try:
        copy = path.open("wb", buffering=0)
    except OSError as error:
        raise ServeError(f"--log-file {str(path)!r} cannot be written: {error.strerror}") from None
    with copy:
        yield ServerLog(copy)


def _gateway(
    options: ServeOptions, endpoints: Endpoints, supervisor: Supervisor, console: Console
) -> contextlib.AbstractContextManager[GatewayProcess | None]:
    if endpoints.openai is None:
        return contextlib.nullcontext()
    keys = () if options.api_keys is None else (f"--api-keys={options.api_keys}",)
    arguments = (*keys, *options.gateway_arguments)
    return GatewayProcess(endpoints, arguments, pids=supervisor.spared, note=console.note)


def _wait_ready(supervisor: Supervisor, plan: _Plan) -> bool:
    server = TritonHttp(plan.endpoints.authority(plan.endpoints.http))
    progress = LoadProgress(plan.engines)
    try:
        return supervisor.wait_ready(server.is_ready, progress.update)
    finally:
        progress.close()


def _announce(console: Console, plan: _Plan, version: str) -> None:
    models = _deployed(console, plan)
    statuses = {name: read_status(folder) for name, folder in plan.engines.items()}
    infos = {name: status.info for name, status in statuses.items() if status is not None and status.info is not None}
    warning = version_warning(version, plan.endpoints.host)
    if warning is not None:
        console.note(f"warning: {warning}")
    console.report(describe_models(version, plan.install.origin, models, infos))


def _describe_endpoints(console: Console, plan: _Plan, options: ServeOptions) -> None:
    has_playground = "--playground" in options.gateway_arguments
    console.report(describe_endpoints(plan.endpoints, _deployed(console, plan), has_playground=has_playground))


def _deployed(console: Console, plan: _Plan) -> list[DeployedModel]:
    try:
        return TritonHttp(plan.endpoints.authority(plan.endpoints.http)).models()
    except OSError as error:
        console.note(f"warning: the server is ready and does not list its models: {error}")
        return []


def _stay(
    supervisor: Supervisor,
    plan: _Plan,
    console: Console,
    health: Health,
    gateway: GatewayProcess | None,
    session: Callable[[Endpoints], None] | None,
    options: ServeOptions,
) -> None:
    """Return when asked to stop, or when `session` is over."""
    guest = None if session is None else threading.Thread(target=session, args=(plan.endpoints,), daemon=True)
    if guest is not None:
        guest.start()

    def is_over() -> bool:
        health.raise_if_given_up()
        if gateway is not None:
            gateway.watch()
        return guest is not None and not guest.is_alive()

    if guest is not None:
        supervisor.watch(is_over)
        return
    died_at = 0.0
    while not supervisor.stop_requested:
        try:
            if supervisor.readiness.state == "starting" and _wait_ready(supervisor, plan):
                console.note(f"ready again after {time.monotonic() - died_at:.1f} s")
            supervisor.watch(is_over, plan.reload, may_give_back=_is_closed(options))
        except CrashLoop:
            raise
        except ServeError as error:
            if not options.restart:
                raise
            console.note(f"{error}\ntidewheel: starting the server again")
            died_at = time.monotonic()
            supervisor.restart(error)


def _farewell(supervisor: Supervisor, drain_s: float) -> str:
    if not supervisor.stop_requested:
        return "stopping"
    return f"stopping: running requests have {drain_s:g} s to end (Ctrl-C again ends them now)"
