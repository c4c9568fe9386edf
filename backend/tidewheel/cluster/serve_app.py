from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import GATEWAY, REPLICA, ClusterSettings, read_settings
from tidewheel.cluster.replica import Replica
from tidewheel.server.endpoints import check_keys

HEAD = "node:__internal_head__"  # the head node, where clients find the gateway
LOOK_S = 1.0
END_S = 20.0  # for a server to end
_STARTS = 3  # failures before Ray gives up
_VERSION = "1"  # constant, so that `scale` keeps running replicas


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
        graceful_shutdown_timeout_s=settings.stream_limit_s + END_S,
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
