"""Single-server queues with closed-form answers, to check the simulator.

Kleinrock, "Queueing Systems, Volume 1: Theory" (1975), chapters 3 (M/M/1) and 5 (M/G/1, Pollaczek-Khinchine). `load`
is the arrival rate times the mean service time, below 1.
"""

from __future__ import annotations

from tidewheel.errors import ConfigError


def mm1_mean_in_system(load: float) -> float:
    """Return the mean number waiting and in service, for exponential service times."""
    return _check_load(load) / (1 - load)


def mg1_mean_in_system(load: float, service_scv: float) -> float:
    """Return the mean number waiting and in service, for any service times.

    `service_scv` is its variance over its squared mean: 0 if constant, 1 if exponential.
    """
    return _check_load(load) + load**2 * (1 + service_scv) / (2 * (1 - load))


def _check_load(load: float) -> float:
    if not 0 <= load < 1:
        raise ConfigError(f"load is {load:g}: a queue settles only from 0 to below 1")
    return load
