"""Replicas of a server on Ray Serve, behind one gateway.

Ray places, restarts and counts them. It carries no tokens.
"""


class ClusterError(Exception):
    """A cluster that cannot be started, found or changed, in one line that says what to do."""
