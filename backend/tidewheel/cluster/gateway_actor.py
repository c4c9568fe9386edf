"""Gateway as a Ray Serve actor, without Serve's proxies."""

from __future__ import annotations

import asyncio
from typing import Any

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings, read_settings
from tidewheel.cluster.replica_upstreams import ReplicaUpstreams, feed_of
from tidewheel.confidential import protect_texts
from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.client_connections import HttpListener
from tidewheel.gateway.run_gateway import listen
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys

_REBIND_S = 10.0  # until a dead gateway's port is free
_PAUSE_S = 0.2


class GatewayActor:
    async def __init__(self, arguments: dict[str, Any], handle: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """`handle`: the replicas' deployment. Raise `ClusterError`."""
        settings = read_settings(arguments)
        protect_texts()
        self._feed = feed_of(handle.deployment_name)
        # `options` starts Ray's router, so that replicas are known before the first request.
        upstreams = ReplicaUpstreams(handle.options(), self._feed, settings)
        try:
            check_keys(settings.host, settings.key_file)
            gateway = Gateway(upstreams, ApiKeys(settings.key_file), settings)
            self._listener = await _listen(gateway, settings)
        except ServeError as error:
            raise ClusterError(str(error)) from None

    async def check_health(self) -> None:
        if not self._listener.addresses:
            raise ClusterError("the gateway does not listen")

    async def figures(self) -> dict[str, dict[str, float]]:
        """Return each replica's last report by gRPC authority."""
        return {one.address.grpc: dict(one.figures) for one in self._feed.replicas.values()}

    async def __del__(self) -> None:
        if hasattr(self, "_listener"):
            await self._listener.cleanup()


async def _listen(gateway: Gateway, settings: ClusterSettings) -> HttpListener:
    """Wait for a dead gateway's port. Raise `ServeError`."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + _REBIND_S
    while True:
        try:
            return await listen(gateway, settings.host, settings.port, settings.drain_s)
        except ServeError:
            if loop.time() > limit:
                raise
            await asyncio.sleep(_PAUSE_S)
