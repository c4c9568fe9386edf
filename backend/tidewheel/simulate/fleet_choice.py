"""Routers and scaling policies by name, and what a policy may learn from past days."""

import math
from collections.abc import Sequence

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.fleet.routers import ROUTERS
from tidewheel.fleet.scaling import ScalingPolicy, ScalingSettings
from tidewheel.fleet.scaling_policies import BUCKET_S, NUM_BUCKETS, PredictiveScaling
from tidewheel.simulate.compared_policies import POLICIES


def check_router(name: str) -> None:
    """Raise `ConfigError` for an unknown router name."""
    if name not in ROUTERS:
        raise ConfigError(f"router is {name!r}: choose one of {', '.join(ROUTERS)}")


def check_scaling(name: str) -> None:
    """Raise `ConfigError` for an unknown policy name."""
    if name not in POLICIES:
        raise ConfigError(f"scaling is {name!r}: choose one of {', '.join(POLICIES)}")


def make_scaling(name: str, settings: ScalingSettings, history: Sequence[float] = ()) -> ScalingPolicy:
    """`history`: arrival times (s) of past days, for `predictive`. Raise as `check_scaling`."""
    check_scaling(name)
    if name == "predictive":
        return PredictiveScaling(settings, bucket_counts(history))
    return POLICIES[name](settings)


def bucket_counts(arrivals: Sequence[float]) -> list[float]:
    """Return the arrivals in each bucket of whole seasons. `arrivals`: seconds since the first season began."""
    if not len(arrivals):
        return []
    num_buckets = math.ceil((max(arrivals) + 1e-9) / (NUM_BUCKETS * BUCKET_S)) * NUM_BUCKETS
    buckets = (np.asarray(arrivals) / BUCKET_S).astype(np.intp)
    return [float(count) for count in np.bincount(buckets, minlength=num_buckets)]
