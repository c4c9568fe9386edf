"""The application on Ray Serve, as the process that runs a cluster deploys, watches and scales it."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_place import free_port
from tidewheel.cluster.cluster_settings import MAX_REPLICAS, ClusterSettings
from tidewheel.cluster.entry_devices import gpus_of
from tidewheel.cluster.serve_app import APPLICATION, GATEWAY, REPLICA, application, has_gpus

_POLL_S = 0.2
_ASK_S = 10.0
_REASON = re.compile(r"^(?:\w+\.)*(?:ClusterError|ConfigError): (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    state: str  # Ray Serve's word
    message: str
    wanted: str  # replicas, or their bounds
    replicas: dict[str, int]  # by state
    port: int  # of the gateway
    figures: dict[str, dict[str, float]]  # reported last, by where a replica listens


class ServedCluster:
    """Owner of the application. Ray must have been started."""

    def __init__(self, settings: ClusterSettings) -> None:
        # A gateway that is started again listens on the same port.
        port = free_port(settings.host, settings.openai_port)
        self._settings = msgspec.structs.replace(settings, openai_port=port)
        self._port = 0
        self._check_room(settings.most_replicas)

    def deploy(self) -> None:
        serve.start(proxy_location="Disabled")
        self._run()

    def status(self) -> ClusterStatus:
        found = serve.status().applications.get(APPLICATION)
        if found is None:
            return ClusterStatus("NOT_STARTED", "", self._wanted, {}, self._port, {})
        replicas = found.deployments.get(REPLICA)
        states = {} if replicas is None else {str(state): count for state, count in replicas.replica_states.items()}
        messages = [found.message, *(one.message for one in found.deployments.values())]
        return ClusterStatus(
            str(found.status.value), _reason(messages), self._wanted, states, self._port, self._figures()
        )

    @property
    def _wanted(self) -> str:
        least, most = self._settings.replicas, self._settings.most_replicas
        return f"{least} to {most}" if most > least else str(least)

    def is_ready(self) -> bool:
        """Return whether all replicas and the gateway serve. Raise `ClusterError` if they cannot."""
        status = self.status()
        if status.state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ClusterError(f"the cluster cannot start: {status.message}")
        if status.state != "RUNNING":
            return False
        self._port = self._port or self._gateway().port.remote().result(timeout_s=_ASK_S)
        return True

    def scale(self, replicas: int) -> None:
        """Change the number of replicas. One that goes lets its streams end. Raise `ClusterError`."""
        if (most := self._settings.most_replicas) > self._settings.replicas:
            raise ClusterError(f"the load decides between {self._settings.replicas} and {most} replicas")
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ClusterError(f"replicas is {replicas}: it must be 1 to {MAX_REPLICAS}")
        self._check_room(replicas)
        self._settings = msgspec.structs.replace(self._settings, replicas=replicas)
        self._run()

    def end(self) -> None:
        """End the gateway, which lets its requests end, and then everything."""
        limit = time.monotonic() + self._settings.drain_s
        serve.delete(APPLICATION, _blocking=False)
        while APPLICATION in serve.status().applications and time.monotonic() < limit:
            time.sleep(_POLL_S)

    def _gateway(self) -> Any:
        return serve.get_deployment_handle(GATEWAY, APPLICATION)

    def _figures(self) -> dict[str, dict[str, float]]:
        """Ask the gateway, which hears of them; without one there are none."""
        if not self._port:
            return {}
        try:
            return dict(self._gateway().figures.remote().result(timeout_s=_ASK_S))
        except (RayError, RayServeException, TimeoutError):
            return {}

    def _run(self) -> None:
        target = serve.RunTarget(target=application(self._settings), name=APPLICATION, route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _check_room(self, replicas: int) -> None:
        """Raise `ClusterError` if Ray would wait for ever for a place."""
        have = ray.cluster_resources()
        gpus = gpus_of(self._settings, has_gpus=has_gpus())
        for what, name, each, option in (
            ("CPUs", "CPU", self._settings.replica_cpus, "--replica-cpus"),
            ("GPUs", "GPU", gpus, "--replica-gpus"),
        ):
            if replicas * each > have.get(name, 0):
                raise ClusterError(
                    f"{replicas} replicas need {replicas * each:g} {what}, and there are {have.get(name, 0):g}: "
                    f"ask for fewer, or for less of each ({option})"
                )


def _reason(messages: list[str]) -> str:
    """Return one line: an error of a replica in Ray's tracebacks, else the first line."""
    for message in messages:
        if found := _REASON.findall(message):
            return str(found[-1])
    return next((message.strip().splitlines()[0] for message in messages if message.strip()), "")


def told(status: ClusterStatus) -> dict[str, object]:
    return asdict(status)
