"""Choice of a replica in Ray Serve, by the project's own routers."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tidewheel.cluster.replica_board import board_of

_PAUSE_S = 0.1  # until another look for a replica


class RayRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Ray Serve makes one in every process that has a handle. A request names its ticket, or a replica."""

    def initialize_state(self, deployment: str, router: str) -> None:
        self._board = board_of(deployment, router)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._board.update({one.replica_id.unique_id: one.replica_metadata for one in replicas})
        for one in replicas:
            if one.routing_stats:
                self._board.report(one.replica_id.unique_id, one.routing_stats)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._board.drop(replica_id.unique_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return the replica that is asked for: Ray's queue gives a choice to the oldest that waits."""
        asked: Any = pending_request.args[0]
        if is_retry:
            await asyncio.sleep(_PAUSE_S)
        while self._board.knows(asked):
            name = self._board.place(asked)
            for key, replica in self.curr_replicas.items():
                if key.unique_id == name:
                    return replica
            await asyncio.sleep(_PAUSE_S)
        raise RayServeException("the request was given up, or its replica has gone")

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ray's queue would call it, which no request enters."""
        raise NotImplementedError("requests are placed one by one, by their tickets")
