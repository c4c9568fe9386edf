"""Deaths of Ray's own processes that a cluster does not survive.

Ray starts workers and Serve's controller again. Nothing starts its store of state again, without which nothing can be
started or scaled, nor the raylet, whose workers end with it.
"""

from __future__ import annotations

import os

from tidewheel.cluster import ClusterError
from tidewheel_process import process_tree

STORE, RAYLET = "gcs_server", "raylet"
_WHAT_FOLLOWS = {
    STORE: "nothing is started again or scaled; requests go on until Ray ends everything, in about a minute",
    RAYLET: "its replicas and the gateway have ended with it",
}


class RayWatch:
    """Watcher of the processes that this one has started Ray with."""

    def __init__(self) -> None:
        named = {child: process_tree.name(child) for child in process_tree.children(os.getpid())}
        self._watched = {child: name for child, name in named.items() if name in _WHAT_FOLLOWS}
        self._dead: set[str] = set()

    @property
    def has_died(self) -> bool:
        return bool(self._dead)

    @property
    def has_ended_all(self) -> bool:
        return RAYLET in self._dead

    @property
    def reason(self) -> str:
        """Return what has died, and what follows; empty: nothing."""
        worst = RAYLET if self.has_ended_all else STORE
        return f"Ray's {worst} died: {_WHAT_FOLLOWS[worst]}" if self._dead else ""

    def look(self) -> bool:
        """Return whether another one has died since the last look."""
        dead = {name for child, name in self._watched.items() if not process_tree.is_alive(child)}
        is_news, self._dead = dead > self._dead, dead
        return is_news

    def check(self) -> None:
        """Raise `ClusterError` if one has died."""
        if self._dead:
            raise ClusterError(self.reason)
