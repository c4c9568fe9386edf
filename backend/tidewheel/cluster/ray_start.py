"""Ray on this machine alone: on loopback, with a token, its files in a private folder, and nothing sent elsewhere."""

from __future__ import annotations

import os
import secrets
from typing import Any

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_place import ClusterPlace

OBJECT_STORE_BYTES = 80 << 20  # Ray's least: no tokens and no weights go through it


def prepare(place: ClusterPlace) -> None:
    """Set what Ray reads at its import, and make its token, which no other cluster has, in no home folder."""
    descriptor = os.open(place.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]  # the address, or the token, of another cluster
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(place.token),
        # Servers end by their lifeline, which lets them drain; Ray would kill their processes one by one.
        RAY_kill_child_processes_on_worker_exit="false",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # the only switch for 127.0.0.1 as the node's address
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="1",  # a replica without GPUs sees none
        AUTOSCALER_METRIC_PORT="0",
        DASHBOARD_METRIC_PORT="0",
    )


def start(place: ClusterPlace, num_cpus: int) -> None:
    """Start it below this process, with which it ends. Raise `ClusterError` if it cannot start."""
    import ray

    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(place.ray),
        )
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ClusterError(f"Ray does not start: {first_line(error)}") from None


def first_line(error: Any) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
