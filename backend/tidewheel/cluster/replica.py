"""Replica of a server: an actor of Ray Serve that supervises one `tidewheel serve`, and never sees a token."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings, read_settings, serve_options
from tidewheel.cluster.replica_figures import figures_of
from tidewheel.cluster.served_process import ServedProcess
from tidewheel.health_endpoint import Readiness

START_LIMIT_S = 1800.0  # that a server may be not ready before its replica is replaced
_LOOK_S = 0.1
_ASK_S = 2.0


class Replica:
    """Ray Serve makes one, asks for its state, and deletes it."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Return when the server is ready. Raise `ClusterError` if it cannot start."""
        settings = read_settings(arguments)
        self._born = self._ready_at = time.monotonic()
        self._process = ServedProcess(serve_options(settings), _address(settings))
        self._figures: dict[str, float] = {}
        try:
            while not (await self._readiness()).is_ready:
                self._check_patience()
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await asyncio.to_thread(self._process.stop)
            raise
        self._ready_at = time.monotonic()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S))

    async def check_health(self) -> None:
        """Raise `ClusterError` if waiting does not help: Ray Serve replaces the replica then.

        A server that is started again by its supervisor keeps its replica, which gets no requests meanwhile.
        """
        readiness = await self._readiness()
        if not readiness.is_live:
            raise ClusterError(f"{readiness.state}: {readiness.reason}")
        if readiness.is_ready:
            self._ready_at = time.monotonic()
        self._check_patience()

    def record_replica_metadata(self) -> dict[str, str]:
        """Return where the server listens, for the gateway."""
        endpoints = self._process.endpoints
        assert endpoints is not None
        ports = {
            "grpc": endpoints.grpc,
            "metrics": endpoints.metrics,
            "health": endpoints.health,
            "http": endpoints.http,
        }
        return {name: endpoints.authority(port) for name, port in ports.items()}

    async def record_routing_stats(self) -> dict[str, float]:
        """Return what the server has to do, for routers that do not see all of its requests."""
        return await self._look()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the same for the policy of scaling: Ray Serve counts only requests that it carries."""
        return await self._look()

    async def __del__(self) -> None:
        if hasattr(self, "_http"):
            await self._http.close()
        if hasattr(self, "_process"):
            await asyncio.to_thread(self._process.stop)

    async def _readiness(self) -> Readiness:
        return await asyncio.to_thread(self._process.readiness)

    def _check_patience(self) -> None:
        if time.monotonic() - self._ready_at > START_LIMIT_S:
            raise ClusterError(f"the server is not ready for {START_LIMIT_S:g} s: {self._process.log}")

    async def _look(self) -> dict[str, float]:
        """Return the figures of its `/metrics`, the last ones if it does not answer. Empty until it has answered."""
        url = f"http://{self.record_replica_metadata()['metrics']}/metrics"
        try:
            async with self._http.get(url) as answer:
                self._figures = figures_of(await answer.text())
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.to_thread(self._process.look)
        if not self._figures:
            return {}
        try:
            is_ready = (await self._readiness()).is_ready
        except ClusterError:  # it has ended
            is_ready = False
        restarts = self._process.num_restarts + self._figures.get("engine_restarts", 0.0)
        return {
            **self._figures,
            "is_ready": float(is_ready),
            "age_s": time.monotonic() - self._born,
            "restarts": restarts,
        }


def _address(settings: ClusterSettings) -> str:
    if settings.replica_host == "loopback":
        return "127.0.0.1"
    import ray.util

    return str(ray.util.get_node_ip_address())
