from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidewheel.cluster import ClusterError
from tidewheel.entries.entry import UnreadableConfig, read_entry
from tidewheel.fleet.routers import ROUTERS
from tidewheel.fleet.scaling import ScalingSettings
from tidewheel.fleet.scaling_policies import SCALING_POLICIES
from tidewheel.gateway.gateway_options import GatewayOptions
from tidewheel.server import repository

APPLICATION, REPLICA, GATEWAY = "tidewheel", "replica", "gateway"  # names in Ray Serve
MAX_REPLICAS = 1024
DAY_S = 86_400
_NOT_SET = ("min_replicas", "max_replicas", "ongoing_per_replica")  # the cluster's own bounds; of a simulation alone
_POLICY_SETTINGS = [field.name for field in fields(ScalingSettings) if field.name not in _NOT_SET]
_RANGES = (
    ("replicas", 0, MAX_REPLICAS),
    ("max_replicas", 0, MAX_REPLICAS),
    ("replica_cpus", 0, 1024),
    ("replica_gpus", 0, 64),
    ("port", 0, 65535),
    ("max_body_mb", 1, 1024),
    ("patience_s", 0, DAY_S),
    ("stream_limit_s", 1, DAY_S),
    ("drain_s", 0, DAY_S),
)


class ClusterSettings(GatewayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a cluster's gateway and replicas. Paths are on the replicas' machines."""

    port: int = msgspec.field(default=8080, name="openai_port")
    router: str = "prefix-aware"
    patience_s: float = 30.0  # wait of an unanswered request for a replica
    model_repository: str = ""
    models: list[str] = msgspec.field(default_factory=list)  # empty: all
    model: str = ""  # in place of a repository: a Hugging Face folder or id
    replicas: int = 1  # fewest, with `max_replicas`; 0: none without requests
    max_replicas: int = 0  # bound of `scaling`; 0: always `replicas`
    scaling: str = "reactive"
    scaling_settings: dict[str, float] = msgspec.field(default_factory=dict)
    replica_cpus: float = 1.0
    replica_gpus: float | None = None  # null: see `gpus`
    replica_host: Literal["loopback", "node"] = "loopback"  # listening address; node: the node's
    serve_arguments: list[str] = msgspec.field(default_factory=list)  # more options of `tidewheel serve`
    stream_limit_s: float = 600.0  # for requests of a removed replica

    def check(self) -> None:
        """Raise `ClusterError` for a wrong setting, or `ConfigError` for a wrong scaling setting."""
        if bool(self.model) == bool(self.model_repository):
            raise ClusterError("give either model or model_repository: what the replicas serve")
        if self.model and self.models:
            raise ClusterError("models chooses entries of a model_repository: it does not go with model")
        for name, known in (("router", ROUTERS), ("scaling", SCALING_POLICIES)):
            if getattr(self, name) not in known:
                raise ClusterError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(known)}")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ClusterError(f"max_replicas is {self.max_replicas}: it must be replicas, {self.replicas}, or more")
        if not self.replicas and not self.max_replicas:
            raise ClusterError(f"replicas is 0: it must be 1 to {MAX_REPLICAS}, or max_replicas be given")
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                name = "openai_port" if name == "port" else name
                raise ClusterError(f"{name} is {value}: it must be {least} to {most}")
        self._check_scaling()

    @property
    def first_replicas(self) -> int:
        """Number of replicas at the start: at least one, to learn the models from."""
        return max(self.replicas, 1)

    @property
    def most_replicas(self) -> int:
        return max(self.replicas, self.max_replicas)

    @property
    def is_scaled(self) -> bool:
        return self.most_replicas > self.replicas

    @property
    def serve_options(self) -> list[str]:
        if self.model:
            return ["--model", self.model, *self.serve_arguments]
        chosen = ["--models", ",".join(self.models)] if self.models else []
        return ["--model-repository", self.model_repository, *chosen, *self.serve_arguments]

    def policy_settings(self) -> dict[str, Any]:
        return {**self.scaling_settings, "min_replicas": self.replicas, "max_replicas": self.most_replicas}

    def gpus(self, *, has_gpus: bool) -> float:
        """Return `replica_gpus`, else the most ranks of an entry on cuda, or on auto and `has_gpus`.

        Raise `ConfigError`.
        """
        if self.replica_gpus is not None:
            return self.replica_gpus
        given = dict(text.removeprefix("--set=").partition("=")[::2] for text in self.serve_arguments)
        sizes = [
            int(size) if (size := str(one.get("tensor_parallel_size", 1))).isdecimal() else 1
            for one in ([given] if self.model else self._entry_settings())
            if one.get("device", "auto") in (("cuda", "auto") if has_gpus else ("cuda",))
        ]
        return float(max(sizes, default=0))

    def _entry_settings(self) -> Iterator[Mapping[str, object]]:
        folder = Path(self.model_repository)
        repository.check_names(folder, self.models)
        for name in self.models or repository.entries(folder):
            try:
                entry = read_entry(folder / name)
            except UnreadableConfig:
                continue  # the server reports the fault
            if entry.is_ours and not entry.engine_of:
                yield entry.settings

    def _check_scaling(self) -> None:
        for name in self.scaling_settings:
            if name not in _POLICY_SETTINGS:
                raise ClusterError(
                    f"scaling_settings has {name!r}: it may have {', '.join(_POLICY_SETTINGS)}; "
                    "replicas and max_replicas bound the number"
                )
        if self.scaling_settings:  # the bounds alone are right
            ScalingSettings(**self.policy_settings())


def read_settings(arguments: Mapping[str, object]) -> ClusterSettings:
    """Raise `ClusterError` or `ConfigError` for a wrong argument."""
    try:
        settings = msgspec.convert(arguments, ClusterSettings)
    except msgspec.ValidationError as error:
        raise ClusterError(f"arguments of the cluster: {error}") from None
    settings.check()
    return settings
