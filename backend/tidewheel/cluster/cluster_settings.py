"""Settings of a cluster: arguments of `deploy/ray/app.yaml`, or made from options of `tidewheel cluster up`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import msgspec

from tidewheel.cluster import ClusterError
from tidewheel.cluster.ray_scaling import RayScaling
from tidewheel.errors import ConfigError
from tidewheel.fleet.routers import ROUTERS
from tidewheel.fleet.scaling import ScalingSettings

MAX_REPLICAS = 1024
DAY_S = 86_400
# Bounds are those of the cluster, and limits by class are no number.
_POLICY_SETTINGS = [
    field.name
    for field in fields(ScalingSettings)
    if field.name not in ("min_replicas", "max_replicas", "queue_limit_s")
]


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # What each replica serves; paths are those of the machines that replicas run on.
    model_repository: str = ""  # a Triton model repository
    models: list[str] = []  # entries of it; empty: all
    model: str = ""  # in place of a repository: a folder in Hugging Face's format, or an id
    replicas: int = 1  # the least, where there may be more; 0: none while nothing is asked
    max_replicas: int = 0  # above `replicas`: as many as `scaling` wants. 0: always `replicas`
    scaling: str = "reactive"
    scaling_settings: dict[str, float] = {}  # some fields of `ScalingSettings`
    replica_cpus: float = 1.0
    replica_gpus: float | None = None  # null: 1 if the entry's device is cuda, or auto on a cluster with GPUs
    replica_host: Literal["loopback", "node"] = "loopback"  # where it listens; node: at the node's address
    serve_arguments: list[str] = []  # more options of `tidewheel serve`
    # The gateway.
    host: str = "127.0.0.1"
    openai_port: int = 8080
    api_keys: str = ""  # a file; needed beyond loopback
    reasoning: Literal["tagged", "always", "off"] = "tagged"
    max_body_mb: int = 4
    open_metrics: bool = False
    playground: bool = False
    router: str = "prefix-aware"
    patience_s: float = 30.0  # that a request without an answer waits for a replica
    stream_limit_s: float = 600.0  # that a replica which is to go waits for its streams
    drain_s: float = 30.0  # that `tidewheel cluster down` waits for open requests

    def check(self) -> None:
        """Raise `ClusterError` for a value out of range, and for what contradicts."""
        if bool(self.model) == bool(self.model_repository):
            raise ClusterError("give either model or model_repository: what the replicas serve")
        if self.model and self.models:
            raise ClusterError("models chooses entries of a model_repository: it does not go with model")
        if self.router not in ROUTERS:
            raise ClusterError(f"router is {self.router!r}: choose one of {', '.join(ROUTERS)}")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ClusterError(f"max_replicas is {self.max_replicas}: it must be replicas, {self.replicas}, or more")
        if not self.replicas and not self.max_replicas:
            raise ClusterError(f"replicas is 0: it must be 1 to {MAX_REPLICAS}, or max_replicas be given")
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ClusterError(f"{name} is {value}: it must be {least} to {most}")
        self._check_scaling()

    @property
    def first_replicas(self) -> int:
        """Return how many there are at the start: one says which models there are."""
        return max(self.replicas, 1)

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas)

    def scaling_arguments(self) -> dict[str, Any]:
        """Return the arguments of `RayScaling`."""
        bounds = {"min_replicas": self.replicas, "max_replicas": self.most_replicas}
        return {"policy": self.scaling, "settings": {**self.scaling_settings, **bounds}}

    def _check_scaling(self) -> None:
        for name in self.scaling_settings:
            if name not in _POLICY_SETTINGS:
                raise ClusterError(
                    f"scaling_settings has {name!r}: it may have {', '.join(_POLICY_SETTINGS)}; "
                    "replicas and max_replicas bound the number"
                )
        try:
            RayScaling(**self.scaling_arguments())
        except ConfigError as error:
            raise ClusterError(str(error)) from None


_RANGES = (
    ("replicas", 0, MAX_REPLICAS),
    ("max_replicas", 0, MAX_REPLICAS),
    ("replica_cpus", 0, 1024),
    ("replica_gpus", 0, 64),
    ("openai_port", 0, 65535),
    ("max_body_mb", 1, 1024),
    ("patience_s", 0, DAY_S),
    ("stream_limit_s", 1, DAY_S),
    ("drain_s", 0, DAY_S),
)


def read_settings(arguments: Mapping[str, object]) -> ClusterSettings:
    """Raise `ClusterError` for an unknown or wrong one."""
    try:
        settings = msgspec.convert(arguments, ClusterSettings)
    except msgspec.ValidationError as error:
        raise ClusterError(f"arguments of the cluster: {error}") from None
    settings.check()
    return settings


def serve_options(settings: ClusterSettings) -> list[str]:
    """Return the options of `tidewheel serve` that say what to serve."""
    if settings.model:
        return ["--model", settings.model, *settings.serve_arguments]
    chosen = ["--models", ",".join(settings.models)] if settings.models else []
    return ["--model-repository", settings.model_repository, *chosen, *settings.serve_arguments]
