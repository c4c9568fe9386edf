"""Replicas of a server on Ray Serve, behind one gateway."""

from typing import Any


class ClusterError(Exception):
    """Failure of a cluster, with its remedy in the message."""


def without_client_server(parameters: Any, head: bool) -> None:  # noqa: ARG001
    """Turn off Ray's server for remote clients, as a start hook: `ray start` has no option."""
    parameters.ray_client_server_port = None
