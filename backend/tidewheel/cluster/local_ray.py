"""Ray on loopback for one user, with a token and a private folder.

`ray start` holds the folder's lock, and ends Ray if state store or raylet dies; the kernel ends both with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.private_dir import MAX_SOCKET_PATH, RUN_DIR, private_dir, read_value, run_dir_path
from tidewheel.server import workdir
from tidewheel.server.workdir import CLUSTER
from tidewheel_process.child import Child, StartError, last_line, wait_until
from tidewheel_process.locked_folder import LOCK, LOOK_S, is_left_over, try_lock
from tidewheel_process.process_tree import arguments, signal_all, started_with

OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; tokens and weights bypass it
START_LIMIT_S = 120.0
_END_S = 15.0  # for Ray and servers to end
_POLL_S = 0.1
NO_OUTPUT = "it printed nothing"
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
    f"--object-store-memory={OBJECT_STORE_BYTES}",
)


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
    def here(cls) -> ClusterFolder:
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


def start(folder: ClusterFolder, lock: IO[bytes], num_cpus: int) -> Child:
    """Start Ray; the process `ray start` inherits the folder's lock. Raise `ClusterError`."""
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *_OPTIONS]
    command += [f"--num-cpus={num_cpus}", f"--temp-dir={folder.ray}"]
    with folder.log.open("wb") as log:
        environment = {**folder.environment(), RUN_DIR: str(folder.run)}
        child = Child(command, stdout=log, stderr=log, env=environment, pass_fds=(lock.fileno(),))
    try:
        child.wait_ready(lambda: bool(folder.address), START_LIMIT_S)
    except StartError as error:
        raise ClusterError(f"ray start {error}: {last_line(folder.log) or NO_OUTPUT}") from None
    return child


@contextlib.contextmanager
def connected(folder: ClusterFolder) -> Iterator[Any]:
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
        raise ClusterError(f"Ray fails: {type(error).__name__}: {first_line(str(error))}") from None
    finally:
        ray.shutdown()


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason given")
