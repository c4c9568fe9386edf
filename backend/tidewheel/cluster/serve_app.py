import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import psutil
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import GATEWAY, REPLICA, ClusterSettings, read_settings
from tidewheel.cluster.ray_scaling import figures_of
from tidewheel.engine.connection import drain_all
from tidewheel.health_endpoint import Readiness
from tidewheel.private_dir import read_value, run_dir
from tidewheel.server.endpoints import Endpoints, check_keys
from tidewheel.server.workdir import current_engines_of
from tidewheel_process import process_tree
from tidewheel_process.child import Child, wait_until
from tidewheel_process.locked_folder import new_folder, remove_left_over

HEAD = "node:__internal_head__"  # the head node, where clients find the gateway
LOOK_S = 1.0  # between Ray's own looks
_RAY_KILL_S = 20.0  # after the last stream
_STARTS = 3  # failures before Ray gives up
_VERSION = "1"  # constant, so that `scale` keeps running replicas
START_LIMIT_S = 1800.0  # until a replica without a ready server is replaced
_START_LOOK_S = 0.1
_ASK_S = 2.0
_DRAIN_LOOK_S = 0.5
_STOP_S = 15.0  # less than `_RAY_KILL_S`
_PREFIX = "replica-"
_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")


class Replica:
    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Start the server, or raise `ClusterError`."""
        self._born = self._ready_at = time.monotonic()
        self._stream_limit_s = settings.stream_limit_s
        host = str(ray.util.get_node_ip_address()) if settings.replica_host == "node" else "127.0.0.1"
        self._server = ServerChild(settings.serve_options, host)
        self._figures: dict[str, float] = {}
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S))
        try:
            while not (await self._readiness()).is_ready:
                self._check_patience()
                await asyncio.sleep(_START_LOOK_S)
        except BaseException:
            await self._http.close()
            await asyncio.to_thread(self._server.stop)
            raise
        self._ready_at = time.monotonic()

    async def check_health(self) -> None:
        """Raise `ClusterError` if Ray must replace this replica; a restarting server is healthy."""
        readiness = await self._readiness()
        if not readiness.is_live:
            raise ClusterError(f"{readiness.state}: {readiness.reason}")
        if readiness.is_ready:
            self._ready_at = time.monotonic()
        self._check_patience()

    async def wait_for_start(self) -> None:
        """Return at once. Ray queues the call until a replica exists."""

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the server's addresses: the fields of `Address`."""
        assert self._server.endpoints is not None
        return self._server.endpoints.authorities

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the server's metrics for gateway and status; without an answer, the previous ones."""
        endpoints = self._server.endpoints
        assert endpoints is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.get(endpoints.metrics_url) as answer:
                self._figures = figures_of(await answer.text())
        await asyncio.to_thread(self._server.count_restarts)
        if not self._figures:
            return {}
        is_ready = False
        with contextlib.suppress(ClusterError):
            is_ready = (await self._readiness()).is_ready
        restarts = self._server.num_restarts + self._figures.get("engine_restarts", 0.0)
        age_s = time.monotonic() - self._born
        return {**self._figures, "is_ready": float(is_ready), "age_s": age_s, "restarts": restarts}

    record_autoscaling_stats = record_routing_stats

    async def __del__(self) -> None:
        if hasattr(self, "_http"):
            await asyncio.to_thread(self._server.drain, self._stream_limit_s)
            await asyncio.to_thread(self._server.stop)
            await self._http.close()

    async def _readiness(self) -> Readiness:
        self._server.check_alive()
        if (endpoints := self._server.endpoints) is None:
            return Readiness("starting", "it chooses its ports")
        try:
            async with self._http.get(endpoints.ready_url) as answer:
                reply = await answer.json()
                return Readiness(reply["state"], reply["reason"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            return Readiness("starting", f"its health endpoint does not answer: {error}")

    def _check_patience(self) -> None:
        if time.monotonic() - self._ready_at > START_LIMIT_S:
            raise ClusterError(f"the server is not ready for {START_LIMIT_S:g} s: {self._server.log}")


class ServerChild:
    """Child process `tidewheel serve`. It ends when its standard input closes, also when this process dies."""

    def __init__(self, options: Sequence[str], host: str) -> None:
        remove_left_over(base := run_dir(), _PREFIX)
        self._made = contextlib.ExitStack()
        folder = self._made.enter_context(new_folder(base, _PREFIX))
        self._ports = folder / "ports.json"
        self.log = folder / "log"
        self.num_restarts = 0
        self._endpoints: Endpoints | None = None
        self._tritonserver: psutil.Process | None = None
        # No drain at its end: `drain` was called before, and a killed replica's requests shall fail at once.
        manner = (f"--ports-file={self._ports}", "--end-with-stdin", "--drain-s=0")
        command = [sys.executable, "-P", "-m", "tidewheel.cli.main", "serve", *options, f"--host={host}"]
        with self.log.open("wb") as output:
            self._child = Child(
                [*command, *_FREE_PORTS, *manner],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ray's token is not for servers.
                env={key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SERVE_"))},
            )

    @property
    def endpoints(self) -> Endpoints | None:
        """Ports of the server; None until it has chosen them."""
        if self._endpoints is None:
            self._endpoints = read_value(self._ports, Endpoints)
        return self._endpoints

    def check_alive(self) -> None:
        """Raise `ClusterError` if the server's process has ended."""
        if not self._child.has_ended:
            return
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("tidewheel: error: ")] or lines or ["it printed nothing"]
        reason = errors[-1].removeprefix("tidewheel: error: ")
        raise ClusterError(f"tidewheel serve ended with {self._child.exit}: {reason}")

    def count_restarts(self) -> None:
        for process in process_tree.children(self._child.pid):
            if process_tree.name(process) == "tritonserver" and process != self._tritonserver:
                self.num_restarts += self._tritonserver is not None
                self._tritonserver = process

    def drain(self, limit_s: float) -> None:
        """Refuse new requests, which the gateway sends elsewhere, and wait for running ones."""
        engines = [] if self.endpoints is None else current_engines_of(self.endpoints.metrics)
        wait_until(lambda: not drain_all(engines, _ASK_S), limit_s, _DRAIN_LOOK_S)

    def stop(self) -> None:
        self._child.stdin.close()
        if not self._child.ends_within(_STOP_S):
            self._child.kill()  # its guard ends the rest
        self._made.close()


class GatewayActor:
    """Ray actor that runs the gateway, without Ray Serve's proxies."""

    async def __init__(self, settings: ClusterSettings, handle: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """`handle`: Ray's handle to the replicas. Raise `ServeError` or `ConfigError`."""
        from tidewheel.cluster.replica_upstreams import FEED, ReplicaUpstreams  # only here: 0.5 s
        from tidewheel.confidential import protect_texts
        from tidewheel.gateway.api_keys import ApiKeys
        from tidewheel.gateway.application import Gateway
        from tidewheel.gateway.client_connections import HttpListener

        protect_texts()
        check_keys(settings.host, settings.api_keys)
        self._feed = FEED
        # `options` starts Ray's router, so that replicas are known before the first request.
        upstreams = ReplicaUpstreams(handle.options(), self._feed, settings)
        gateway = Gateway(upstreams, ApiKeys(settings.api_keys), settings)
        self._listener = await HttpListener.open(gateway.application(), settings)

    async def check_health(self) -> None:
        if not self._listener.addresses:
            raise ClusterError("the gateway does not listen")

    async def figures(self) -> dict[str, dict[str, float]]:
        """Return the last metrics of each replica, by gRPC address."""
        return {one.address.grpc: dict(one.figures) for one in self._feed.replicas}

    async def __del__(self) -> None:
        if hasattr(self, "_listener"):
            await self._listener.cleanup()


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the Ray Serve application, also for `serve deploy`. Raise `ClusterError` or `ConfigError`."""
    return application(read_settings(arguments))


def application(settings: ClusterSettings) -> serve.Application:
    return _gateway(settings).bind(settings, _replicas(settings).bind(settings))


def replica_gpus(settings: ClusterSettings) -> float:
    return settings.gpus(has_gpus=bool(ray.cluster_resources().get("GPU")))


def _replicas(settings: ClusterSettings) -> serve.Deployment:
    return serve.deployment(Replica).options(
        name=REPLICA,
        **_number(settings),
        ray_actor_options={"num_cpus": settings.replica_cpus, "num_gpus": replica_gpus(settings)},
        health_check_period_s=LOOK_S,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=settings.stream_limit_s + _RAY_KILL_S,
        graceful_shutdown_wait_loop_s=LOOK_S,
        max_constructor_retry_count=_STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class="tidewheel.cluster.ray_router:FeedingRouter", request_routing_stats_period_s=LOOK_S
        ),
        version=_VERSION,
        _internal=True,
    )


def _number(settings: ClusterSettings) -> dict[str, Any]:
    if not settings.is_scaled:
        return {"num_replicas": settings.replicas}
    policy = AutoscalingPolicy(
        policy_function="tidewheel.cluster.ray_scaling:RayScaling",
        policy_kwargs={"policy": settings.scaling, "settings": settings.policy_settings()},
    )
    # The policy has delays of its own.
    config = AutoscalingConfig(
        min_replicas=settings.replicas,
        initial_replicas=settings.first_replicas,
        max_replicas=settings.most_replicas,
        metrics_interval_s=LOOK_S,
        look_back_period_s=5 * LOOK_S,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=policy,
    )
    return {"autoscaling_config": config}


def _gateway(settings: ClusterSettings) -> serve.Deployment:
    return serve.deployment(GatewayActor).options(
        name=GATEWAY,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        health_check_period_s=LOOK_S,
        graceful_shutdown_timeout_s=settings.drain_s + 5.0,
        max_constructor_retry_count=_STARTS,
        version=_VERSION,
        _internal=True,
    )
