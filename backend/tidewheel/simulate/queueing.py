"""Single-server queues that have an answer on paper, to hold the simulator against.

Kleinrock, "Queueing Systems, Volume 1: Theory" (1975): M/M/1 in chapter 3, M/G/1 (Pollaczek-Khinchine) in chapter 5.
Times in seconds; `load` is the arrival rate times the mean service time, below 1.
"""

from __future__ import annotations

from tidewheel.errors import ConfigError


def mm1_mean_in_system(load: float) -> float:
    """Mean number of requests waiting and in service, with exponential service times."""
    return _check_load(load) / (1 - load)


def mg1_mean_in_system(load: float, service_scv: float) -> float:
    """The same for any service time, whose squared coefficient of variation is `service_scv`: variance over squared
    mean; 0 for a constant, 1 for the exponential."""
    return _check_load(load) + load**2 * (1 + service_scv) / (2 * (1 - load))


def _check_load(load: float) -> float:
    if not 0 <= load < 1:
        raise ConfigError(f"load is {load:g}: a queue settles only from 0 to below 1")
    return load
