from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tidewheel.errors import ConfigError
from tidewheel.fleet.plain_routers import LeastLoaded, RoundRobin, SessionAffinity
from tidewheel.fleet.prefix_router import PrefixAware
from tidewheel.fleet.router import Router

ROUTERS: Mapping[str, Callable[[], Router[Any]]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "session-affinity": SessionAffinity,
        "prefix-aware": PrefixAware,
    }
)


def check_router(name: str) -> None:
    """Raise `ConfigError` for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"router is {name!r}: choose one of {', '.join(ROUTERS)}")


def make_router(name: str) -> Router[Any]:
    """Return a router without replicas: those join. Raise `ConfigError`."""
    check_router(name)
    return ROUTERS[name]()
