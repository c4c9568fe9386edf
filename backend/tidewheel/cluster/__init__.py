"""Replicas of a server on Ray Serve, behind one gateway.

Ray places, restarts and counts the replicas. Tokens go from a replica's server to the gateway, not through Ray.
"""

from typing import Any


class ClusterError(Exception):
    """Failure to start, find or change a cluster, in one line that says what to do."""


def without_client_server(parameters: Any, head: bool) -> None:  # noqa: ARG001
    """Hook of `ray start`, which else starts a server for remote clients that no option leaves out."""
    parameters.ray_client_server_port = None
