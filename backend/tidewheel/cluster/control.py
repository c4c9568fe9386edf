from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tidewheel.cluster import ClusterError, local_ray
from tidewheel.cluster.cluster_settings import APPLICATION, GATEWAY, MAX_REPLICAS, REPLICA, ClusterSettings
from tidewheel.cluster.local_ray import ClusterFolder, connected, first_line
from tidewheel.private_dir import write_value
from tidewheel.server.endpoints import check_keys, free_port
from tidewheel_process.child import last_line, wait_until

_POLL_S = 0.2
_ASK_S = 10.0
_REASON = re.compile(r"^(?:\w+\.)*(?:ClusterError|ConfigError|ServeError): (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
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
        ray = local_ray.start(folder, lock, len(os.sched_getaffinity(0)))
        with connected(folder) as serve:
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
                    raise ClusterError(f"Ray ended at its start: {last_line(folder.log) or local_ray.NO_OUTPUT}")
                time.sleep(_POLL_S)
        return settings.port


def status(folder: ClusterFolder) -> ClusterStatus:
    """Raise `ClusterError` without a cluster."""
    settings = folder.settings
    with connected(folder) as serve:
        return _status(serve, settings)


def scale(folder: ClusterFolder, replicas: int) -> ClusterStatus:
    """Change the number of replicas; removed ones drain. Raise `ClusterError` if too few fit."""
    settings = folder.settings
    if settings.is_scaled:
        raise ClusterError(f"the load decides between {settings.replicas} and {settings.most_replicas} replicas")
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ClusterError(f"replicas is {replicas}: it must be 1 to {MAX_REPLICAS}")
    settings = msgspec.structs.replace(settings, replicas=replicas)
    with connected(folder) as serve:
        _deploy(serve, folder, settings)
        return _status(serve, settings)


def down(folder: ClusterFolder) -> None:
    """Drain and end the cluster, or clean up after a dead one. Raise `ClusterError` if there is none."""
    if not folder.root.exists():
        raise ClusterError(f"no cluster of yours is up: there is no {folder.root}")
    with contextlib.suppress(ClusterError):  # without Ray, or without an application
        settings = folder.settings
        with connected(folder) as serve:
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
    return next((first_line(message) for message in messages if message.strip()), "")
