"""Replicas of a server on Ray Serve, behind one gateway. Tokens bypass Ray."""

from typing import Any


class ClusterError(Exception):
    """Fault of a cluster; the message says what to do."""


def without_client_server(parameters: Any, head: bool) -> None:  # noqa: ARG001
    """Keep `ray start` from serving remote clients, for which it has no option."""
    parameters.ray_client_server_port = None
