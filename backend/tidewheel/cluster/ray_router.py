"""Ray Serve router that reports replicas to the gateway.

Ray copies this module with its globals, so state shared with the gateway lives in `replica_upstreams`.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class FeedingRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    # `cluster up` imports this module, which needs the gateway only in the gateway's actor.
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from tidewheel.cluster.replica_upstreams import FEED, KnownReplica
        from tidewheel.gateway.gateway_options import Address

        super().update_replicas(replicas)
        known = (one for one in replicas if one.replica_metadata)
        FEED.publish([KnownReplica(Address(**one.replica_metadata), one.routing_stats or {}) for one in known])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]
