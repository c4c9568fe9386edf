"""The gateway as an actor of Ray Serve, which listens by itself: Serve's proxies carry nothing.

Ray starts it again when it dies. In a replica it has a handle, and with it Ray's news of the others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings, read_settings
from tidewheel.cluster.replica_board import ReplicaBoard, board_of
from tidewheel.cluster.replica_upstreams import ReplicaUpstreams
from tidewheel.confidential import protect_texts
from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.client_connections import HttpListener
from tidewheel.gateway.gateway_options import GatewayOptions
from tidewheel.gateway.run_gateway import listen
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys

_REBIND_S = 10.0  # for the port of a gateway that died to be free again
_PAUSE_S = 0.2


class GatewayActor:
    async def __init__(self, arguments: dict[str, Any], handle: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Raise `ClusterError` if it cannot listen."""
        settings = read_settings(arguments)
        protect_texts()
        keys = Path(settings.api_keys) if settings.api_keys else None
        try:
            check_keys(settings.host, keys)
            self._board = board_of(handle.deployment_name, settings.router)
            self._listener = await _started(_gateway(settings, handle, self._board, keys), settings)
        except ServeError as error:
            raise ClusterError(str(error)) from None

    async def check_health(self) -> None:
        if not self._listener.addresses:
            raise ClusterError("the gateway does not listen")

    async def port(self) -> int:
        """Return the port that it listens on."""
        return int(self._listener.addresses[0][1])

    async def figures(self) -> dict[str, dict[str, float]]:
        """Return what each replica reported last, by where it listens."""
        return {authority: dict(figures) for authority, figures in self._board.figures.items()}

    async def __del__(self) -> None:
        if hasattr(self, "_listener"):
            await self._listener.cleanup()


def _gateway(settings: ClusterSettings, handle: Any, board: ReplicaBoard, keys: Path | None) -> Gateway:
    # `options` starts Ray's router, so that replicas are known before the first request.
    upstreams = ReplicaUpstreams(handle.options(), board, settings.patience_s, may_be_empty=settings.replicas == 0)
    options = GatewayOptions(
        max_body_mb=settings.max_body_mb,
        reasoning=settings.reasoning,
        open_metrics=settings.open_metrics,
        playground=settings.playground,
    )
    return Gateway(upstreams, ApiKeys(keys), options)


async def _started(gateway: Gateway, settings: ClusterSettings) -> HttpListener:
    """Listen, also on the port of a gateway that has just died. Raise `ServeError`."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + _REBIND_S
    while True:
        try:
            return await listen(gateway, settings.host, settings.openai_port, settings.drain_s)
        except ServeError:
            if loop.time() > limit:
                raise
            await asyncio.sleep(_PAUSE_S)
