"""Ray on loopback for one user, with a token and a private folder.

`ray start` holds the folder's lock, and ends Ray if state store or raylet dies; the kernel ends both with it.
"""

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import APPLICATION, GATEWAY, MAX_REPLICAS, REPLICA, ClusterSettings
from tidewheel.private_dir import MAX_SOCKET_PATH, RUN_DIR, private_dir, read_value, run_dir_path, write_value
from tidewheel.server import workdir
from tidewheel.server.endpoints import check_keys, free_port
from tidewheel.server.workdir import CLUSTER
from tidewheel_process.child import Child, StartError, last_line, wait_until
from tidewheel_process.locked_folder import LOCK, LOOK_S, is_left_over, try_lock
from tidewheel_process.process_tree import arguments, signal_all, started_with

_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; tokens and weights bypass it
_START_LIMIT_S = 120.0
_END_S = 15.0  # for Ray and servers to end
_POLL_S = 0.2
_NO_OUTPUT = "it printed nothing"
_LONGEST_BELOW = max(  # names of sockets
    len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store."),
    len("/run/serve-abcdefgh/run/16_letters_model-01234567/0123456789/engine.sock"),
)
_DEATH = re.compile(r"^\s+(\w+) \[exit code=(.+)\]$", re.MULTILINE)
_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    # Servers end with their pipe and answer their requests; Ray would kill their processes one by one.
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only switch for 127.0.0.1 as the node's address
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a replica without GPUs sees none
    "RAY_START_HOOK": "tidewheel.cluster.without_client_server",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # of the node, after its application is gone
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
}
_OPTIONS = (
    "--head",
    "--block",
    "--node-ip-address=127.0.0.1",
    "--port=0",
    "--include-dashboard=false",  # nor its API of jobs, which runs any program
    "--include-log-monitor=false",
    "--no-monitor",
    "--disable-usage-stats",
    f"--object-store-memory={_OBJECT_STORE_BYTES}",
)
_ASK_S = 10.0
_REASON = re.compile(r"^(?:\w+\.)*(?:ClusterError|ConfigError|ServeError): (.*)$", re.MULTILINE)


class ClusterFolder:
    """Private folder of a cluster, whose processes have its path in the environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ray = root / "r"  # short: sockets below it have long names
        self.run = root / "run"
        self.token = root / "token"
        self.log = root / "log"
        self.settings_file = root / "settings"

    @classmethod
    def here(cls) -> "ClusterFolder":
        return cls(run_dir_path() / CLUSTER)

    @property
    def address(self) -> str:
        """Address of Ray's state store; empty until Ray runs."""
        with contextlib.suppress(FileNotFoundError):
            return (self.ray / "ray_current_cluster").read_text(encoding="utf-8")
        return ""

    @property
    def is_up(self) -> bool:
        return self.root.exists() and not is_left_over(self.root)

    @property
    def settings(self) -> ClusterSettings:
        """Raise `ClusterError` without a running cluster."""
        if not self.is_up:
            reason = f"Ray has ended: see {self.log}" if self.root.exists() else "start one with tidewheel cluster up"
            for log in self.ray.glob("session_2*/logs/ray_process_exit.log"):
                if found := _DEATH.search(log.read_text(encoding="utf-8", errors="replace")):
                    death = f"Ray's {found[1]} died ({found[2]}), and replicas and gateway ended with it"
                    reason = f"{death}: see {self.ray}"
            raise ClusterError(f"no cluster of yours is up: {reason}")
        if (settings := read_value(self.settings_file, ClusterSettings)) is None:
            raise ClusterError("the cluster is starting, and has no application yet")
        return settings

    def check_path(self) -> None:
        """Raise `ClusterError` if the path is too long for sockets (107 bytes)."""
        if (excess := len(os.fsencode(self.root)) + _LONGEST_BELOW - MAX_SOCKET_PATH) > 0:
            raise ClusterError(
                f"the path of {self.root} is too long for sockets, by {excess} bytes: set {RUN_DIR} to a shorter one"
            )

    def check_free(self) -> None:
        """Raise `ClusterError` if a cluster is up or starting."""
        if self.is_up:
            raise ClusterError(
                f"a cluster of yours is up in {self.root}: end it with tidewheel cluster down, or set {RUN_DIR}"
            )

    @contextlib.contextmanager
    def made(self) -> Iterator[IO[bytes]]:
        """Make the folder and yield its lock; remove it after an error. Raise `ClusterError` if a cluster is up."""
        private_dir(self.root.parent)
        self.check_free()
        self.remove()  # also the processes of a folder that is gone
        try:
            self.root.mkdir(mode=0o700)
        except FileExistsError:
            self.check_free()
            raise
        if (lock := try_lock(self.root / LOCK, LOOK_S)) is None:
            raise ClusterError(f"{self.root / LOCK} is locked by another process")
        with lock, contextlib.ExitStack() as failed:
            failed.callback(self.remove)
            self.run.mkdir(mode=0o700)
            self.token.touch(mode=0o600)
            self.token.write_text(secrets.token_hex(32), encoding="utf-8")
            yield lock
            failed.pop_all()

    def remove(self) -> None:
        """End the cluster's processes, `ray start` first, and remove the folder."""
        run = str(self.run)
        ray = [one for one in started_with(RUN_DIR, run) if " --block " in " ".join(arguments(one.pid))]
        signal_all(ray, signal.SIGTERM)
        wait_until(lambda: not started_with(RUN_DIR, run), _END_S, _POLL_S)
        workdir.remove(self.root)

    def environment(self) -> dict[str, str]:
        """Return environment variables for Ray, without those of another Ray."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**base, **_VARIABLES, "RAY_AUTH_TOKEN_PATH": str(self.token)}


class ClusterStatus(NamedTuple):
    state: str  # Ray Serve's name
    message: str
    wanted: str  # replicas, or their bounds
    replicas: dict[str, int]  # by state
    port: int
    figures: dict[str, dict[str, float]]  # last reports by gRPC authority


def up(settings: ClusterSettings, note: Callable[[str], None]) -> int:
    """Return the gateway's port. After an error, nothing remains."""
    settings.check()
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("Ray is not installed: pip install 'tidewheel[ray]'")
    check_keys(settings.host, settings.api_keys)
    folder = ClusterFolder.here()
    folder.check_path()
    folder.check_free()
    free_port(settings.host, settings.port, "--openai-port")
    with folder.made() as lock:
        note("starting Ray")
        ray = _start_ray(folder, lock, len(os.sched_getaffinity(0)))
        with _connected(folder) as serve:
            # A restarted gateway listens on the same port.
            settings = msgspec.structs.replace(
                settings, port=free_port(settings.host, settings.port, "--openai-port")
            )
            first = settings.first_replicas
            note(f"starting {first} replica{'s' * (first > 1)} and the gateway")
            _deploy(serve, folder, settings)
            while (found := _status(serve, settings, with_figures=False)).state != "RUNNING":
                if found.state in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise ClusterError(f"the cluster cannot start: {found.message}")
                if ray.has_ended:
                    raise ClusterError(f"Ray ended at its start: {last_line(folder.log) or _NO_OUTPUT}")
                time.sleep(_POLL_S)
        return settings.port


def status(folder: ClusterFolder) -> ClusterStatus:
    """Raise `ClusterError` without a cluster."""
    settings = folder.settings
    with _connected(folder) as serve:
        return _status(serve, settings)


def scale(folder: ClusterFolder, replicas: int) -> ClusterStatus:
    """Change the number of replicas; removed ones drain. Raise `ClusterError` if too few fit."""
    settings = folder.settings
    if settings.is_scaled:
        raise ClusterError(f"the load decides between {settings.replicas} and {settings.most_replicas} replicas")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ClusterError(f"replicas is {replicas}: it must be 1 to {MAX_REPLICAS}")
    settings = msgspec.structs.replace(settings, replicas=replicas)
    with _connected(folder) as serve:
        _deploy(serve, folder, settings)
        return _status(serve, settings)


def down(folder: ClusterFolder) -> None:
    """Drain and end the cluster, or clean up after a dead one. Raise `ClusterError` if there is none."""
    if not folder.root.exists():
        raise ClusterError(f"no cluster of yours is up: there is no {folder.root}")
    with contextlib.suppress(ClusterError):  # without Ray, or without an application
        settings = folder.settings
        with _connected(folder) as serve:
            serve.delete(APPLICATION, _blocking=False)
            wait_until(lambda: APPLICATION not in serve.status().applications, settings.drain_s, _POLL_S)
    folder.remove()


def _deploy(serve: Any, folder: ClusterFolder, settings: ClusterSettings) -> None:
    """Run the Serve application. Raise `ClusterError` if Ray would wait for resources forever."""
    import ray

    from tidewheel.cluster.serve_app import application, replica_gpus

    have = ray.cluster_resources()
    for what, name, each, option in (
        ("CPUs", "CPU", settings.replica_cpus, "--replica-cpus"),
        ("GPUs", "GPU", replica_gpus(settings), "--replica-gpus"),
    ):
        needed = settings.most_replicas * each
        if needed > have.get(name, 0):
            raise ClusterError(
                f"{settings.most_replicas} replicas need {needed:g} {what}, and there are {have.get(name, 0):g}: "
                f"ask for fewer, or for less of each ({option})"
            )
    write_value(folder.settings_file, settings)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(target=application(settings), name=APPLICATION, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _status(serve: Any, settings: ClusterSettings, *, with_figures: bool = True) -> ClusterStatus:
    least, most = settings.replicas, settings.most_replicas
    wanted = f"{least} to {most}" if settings.is_scaled else str(least)
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return ClusterStatus("NOT_STARTED", "", wanted, {}, settings.port, {})
    replicas = found.deployments.get(REPLICA)
    states = {} if replicas is None else {str(state): count for state, count in replicas.replica_states.items()}
    reason = _reason([found.message, *(one.message for one in found.deployments.values())])
    figures = _figures(serve) if with_figures else {}
    return ClusterStatus(str(found.status.value), reason, wanted, states, settings.port, figures)


def _figures(serve: Any) -> dict[str, dict[str, float]]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        gateway = serve.get_deployment_handle(GATEWAY, APPLICATION)
        return dict(gateway.figures.remote().result(timeout_s=_ASK_S))
    except (RayError, RayServeException, TimeoutError):
        return {}


def _reason(messages: list[str]) -> str:
    for message in messages:
        if found := _REASON.findall(message):
            return str(found[-1])
    return next((_first_line(message) for message in messages if message.strip()), "")


def _start_ray(folder: ClusterFolder, lock: IO[bytes], num_cpus: int) -> Child:
    """Start Ray; the process `ray start` inherits the folder's lock. Raise `ClusterError`."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *_OPTIONS]
    command += [f"--num-cpus={num_cpus}", f"--temp-dir={folder.ray}"]
    with folder.log.open("wb") as log:
        environment = {**folder.environment(), RUN_DIR: str(folder.run)}
        child = Child(command, stdout=log, stderr=log, env=environment, pass_fds=(lock.fileno(),))
    try:
        child.wait_ready(lambda: bool(folder.address), _START_LIMIT_S)
    except StartError as error:
        raise ClusterError(f"ray start {error}: {last_line(folder.log) or _NO_OUTPUT}") from None
    return child


@contextlib.contextmanager
def _connected(folder: ClusterFolder) -> Iterator[Any]:
    """Connect this process to the cluster's Ray, and yield `ray.serve`. Raise `ClusterError` for Ray's errors."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(folder.environment())
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).disabled = True  # the caller reports errors
    import ray  # reads the environment
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        ray.init(address=folder.address, log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1")
        yield serve
    except (RayError, RayServeException, OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"Ray fails: {type(error).__name__}: {_first_line(str(error))}") from None
    finally:
        ray.shutdown()


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason given")
