"""Publication of Ray Serve's replicas to the gateway.

Ray copies this module by value, so shared state lives in `replica_upstreams`.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tidewheel.cluster.replica_upstreams import KnownReplica, feed_of
from tidewheel.gateway.upstream import Address


class FeedingRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Router of Ray Serve that publishes replicas."""

    def initialize_state(self, deployment: str) -> None:
        self._feed = feed_of(deployment)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._feed.publish(
            {
                one.replica_id.unique_id: KnownReplica(Address(**one.replica_metadata), one.routing_stats or {})
                for one in replicas
                if one.replica_metadata
            }
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop the replica, before Ray's controller reports its death."""
        super().on_replica_actor_died(replica_id)
        self._feed.drop(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]
