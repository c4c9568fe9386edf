from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tidewheel.adapter.repository_entry import real_entry
from tidewheel.engine.folder import CURRENT, engine_dir, read_status
from tidewheel.engine.launcher import FAULTS_ALLOWED
from tidewheel.private_dir import unwritable
from tidewheel.server import CrashLoop, ServeError, launch, model_control, own_servers, processes, repository
from tidewheel.server.console import Console, LoadProgress, describe_endpoints, describe_models, version_warning
from tidewheel.server.control_socket import ControlSocket
from tidewheel.server.endpoints import Endpoints, check_keys
from tidewheel.server.gateway_process import GatewayProcess
from tidewheel.server.health import Health
from tidewheel.server.lifeline import Lifeline, stop_with_parent
from tidewheel.server.locate import TritonInstall, locate
from tidewheel.server.model_control import ModelControl
from tidewheel.server.processes import StopSignals
from tidewheel.server.server_log import ServerLog
from tidewheel.server.supervisor import Supervisor
from tidewheel.server.triton_http import DeployedModel, TritonHttp
from tidewheel.server.workdir import WorkDir, work_dir

_POLL_S = 1
_STDIN = 0
_MODELS_API: Literal["model-repository"] = "model-repository"
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
    open_apis: tuple[launch.ClosedApi, ...] = ()  # `model-repository` with `explicit` alone
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
            _model_control(options, work, log, triton, supervisor),
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
        opened=opened_apis(options),
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
    return not (
        options.model_control == "poll"
        or _MODELS_API in options.open_apis
        or any(argument.startswith(_OWN_CONTROL) for argument in options.triton_arguments)
    )


def opened_apis(options: ServeOptions) -> set[launch.ClosedApi]:
    """Return Triton's APIs that need no secret header.

    `model-repository` is one of them unless `--triton-arg` asks for explicit model control: in every other mode
    Triton itself refuses loads, and the API only lists models.
    """
    is_explicit = any("explicit" in argument for argument in options.triton_arguments)
    return {*options.open_apis, *(() if is_explicit else (_MODELS_API,))}


def _is_polled(options: ServeOptions) -> bool:
    """Return whether Triton polls the private repository. That needs a high limit of open files.

    Without a free descriptor a polling Triton unloads the models that it cannot see. Raise `ServeError` if the limit
    is too low and `--model-control explicit` needs polling.
    """
    if not _is_closed(options):
        return False
    limit = processes.raise_descriptor_limit()
    if options.model_control == "explicit" and limit < processes.MANY_DESCRIPTORS:
        raise ServeError(
            f"--model-control explicit needs {processes.MANY_DESCRIPTORS} open files, and {limit} are allowed: allow "
            "more (ulimit -Hn)"
        )
    return limit >= processes.MANY_DESCRIPTORS


def _control_flags(options: ServeOptions) -> list[str]:
    if _is_polled(options):
        return launch.control_flags("poll", (), _POLL_S)
    mode = "none" if _is_closed(options) else options.model_control
    return launch.control_flags(mode, options.models, options.repository_poll_s)


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
    """Return a warning for each open API: what any client that reaches it can do."""
    host, warnings = options.endpoints.host, []
    if "shared-memory" in options.open_apis:
        warnings.append(
            "--open-api shared-memory lets all that reach the ports, other users of the machine included, read and "
            "change the requests of others (docs/proxy.md)"
        )
    if _MODELS_API in options.open_apis:
        warnings.append(
            f"--open-api {_MODELS_API} lets all that reach {host} run code as this user: other users of the machine, "
            "and every web page that a browser on it opens (docs/proxy.md)"
        )
    return warnings


def _repository(options: ServeOptions, work: WorkDir) -> Path:
    source = _source(options, work)
    if options.model_repository is None:
        model = options.model or ""
        name = options.model_name or repository.served_name(model)
        repository.write_entry(source, model, repository.check_name(name), options.settings)
    if _is_closed(options):
        return repository.mirror(source, options.models, work.repository)
    if options.model_control == "explicit":
        repository.check_names(source, options.models)
        return source
    return repository.select(source, options.models, work.repository) if options.models else source


def _source(options: ServeOptions, work: WorkDir) -> Path:
    """Return the operator's repository, or that of the entries that `--model` makes."""
    return (options.model_repository or work.written).expanduser().resolve()


def _model_control(
    options: ServeOptions, work: WorkDir, log: ServerLog, triton: TritonHttp, supervisor: Supervisor
) -> contextlib.AbstractContextManager[object]:
    """Return the control socket for `tidewheel load`, `unload` and `reload`.

    A null context without `--model-control explicit`, or where models are loaded over Triton's own API.
    """
    if options.model_control != "explicit" or not _is_closed(options):
        return contextlib.nullcontext()

    def check() -> None:
        if supervisor.readiness.state in ("starting", "draining", "stopped"):
            raise ServeError(f"the server is {supervisor.readiness.state}: nothing can be loaded until it is ready")

    source = _source(options, work)
    control = ModelControl(source, work.repository, check=check, serves=triton.serves, forget=supervisor.forget)
    log.on_load = control.note_load
    supervisor.on_restart = control.note_restart
    return ControlSocket(work.control, control.handle, ServeError)


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
