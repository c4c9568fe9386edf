"""Traces of requests: synthetic from a seed, or recorded in JSONL or CSV files.

A file has one request per line (CSV: after a header line) with the fields

    arrival          seconds from the start           required
    prompt_tokens    tokens in the prompt             required
    output_tokens    tokens generated                 required
    priority         1 (CRITICAL) … 4 (LOW), 0 or absent: NORMAL
    tenant           a name
    session          a name; each turn's prompt extends the last
    prefix_group     a name; its requests share their first prefix_tokens tokens
    prefix_tokens    with prefix_group
    deadline_s       seconds from arrival; absent: never
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.simulate.lengths import Int32Array, Lengths

FloatArray = npt.NDArray[np.float64]
NOBODY = -1  # no session or prefix group


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Columns [n] in order of arrival; names are indices into the tuples beside them."""

    arrivals: FloatArray  # seconds
    prompt_tokens: Int32Array
    output_tokens: Int32Array
    priorities: Int32Array
    tenants: Int32Array
    tenant_names: tuple[str, ...] = ("",)
    sessions: Int32Array
    session_names: tuple[str, ...] = ()
    prefix_groups: Int32Array
    prefix_names: tuple[str, ...] = ()
    prefix_tokens: Int32Array
    deadlines: FloatArray  # seconds after arrival; infinite: none

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def rate(self) -> float:
        """Requests per second over the trace."""
        span = float(self.arrivals[-1] - self.arrivals[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span > 0 else 0.0

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def scaled(self, factor: float) -> Trace:
        """Return the same requests, `factor` times as fast."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Trace(**(values | {"arrivals": self.arrivals / factor}))


class Prefixes(NamedTuple):
    """System prompts of `num_tokens` tokens; `num_groups` used by Zipf's law."""

    num_groups: int
    num_tokens: int


class Tenants(NamedTuple):
    names: tuple[str, ...] = ("",)
    shares: tuple[float, ...] = (1.0,)
    priorities: tuple[Priority, ...] = (Priority.NORMAL,)


def synthesise(
    count: int,
    arrivals: FloatArray,
    prompt: Lengths,
    output: Lengths,
    rng: np.random.Generator,
    *,
    tenants: Tenants = Tenants(),  # noqa: B008 - immutable
    prefixes: Prefixes | None = None,
) -> Trace:
    shares = np.array(tenants.shares) / sum(tenants.shares)
    tenant_index = rng.choice(len(shares), size=count, p=shares).astype(np.int32)
    prompt_tokens = prompt.draw(count, rng)
    groups, prefix_tokens = np.full(count, NOBODY, dtype=np.int32), np.zeros(count, dtype=np.int32)
    if prefixes is not None:
        weights = 1 / np.arange(1, prefixes.num_groups + 1)
        groups = rng.choice(prefixes.num_groups, size=count, p=weights / weights.sum()).astype(np.int32)
        prefix_tokens[:] = prefixes.num_tokens
        prompt_tokens += np.int32(prefixes.num_tokens)
    return Trace(
        arrivals=arrivals,
        prompt_tokens=prompt_tokens,
        output_tokens=output.draw(count, rng),
        priorities=np.array(tenants.priorities, dtype=np.int32)[tenant_index],
        tenants=tenant_index,
        tenant_names=tenants.names,
        sessions=np.full(count, NOBODY, dtype=np.int32),
        prefix_groups=groups,
        prefix_names=tuple(f"group-{index}" for index in range(prefixes.num_groups)) if prefixes else (),
        prefix_tokens=prefix_tokens,
        deadlines=np.full(count, np.inf),
    )


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> FloatArray:
    """Return a Poisson process of `rate` arrivals a second."""
    _check_rate(rate)
    return np.asarray(np.cumsum(rng.exponential(1 / rate, count)))


def bursty_arrivals(count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 4.0) -> FloatArray:
    """Return arrivals in clumps: gamma distributed gaps.

    Their variance is `burstiness` times that of a Poisson process of the same rate; 1 is Poisson.
    """
    _check_rate(rate)
    if not 0.1 <= burstiness <= 1000:
        raise ConfigError(f"burstiness is {burstiness:g}: it must be 0.1 to 1000")
    return np.asarray(np.cumsum(rng.gamma(1 / burstiness, burstiness / rate, count)))


def switching_arrivals(
    count: int,
    rate: float,
    rng: np.random.Generator,
    *,
    ratio: float = 8.0,
    busy_share: float = 0.2,
    mean_busy_s: float = 5.0,
) -> FloatArray:
    """Return a two-state Markov modulated Poisson process (Fischer, Meier-Hellstern, 1993).

    Busy spells, `mean_busy_s` seconds on average, take `busy_share` of the time; requests arrive `ratio` times as
    fast in them.
    """
    _check_rate(rate)
    calm_rate = rate / (1 - busy_share + ratio * busy_share)
    rates = (calm_rate, ratio * calm_rate)
    mean_spells = (mean_busy_s * (1 - busy_share) / busy_share, mean_busy_s)
    arrivals: list[FloatArray] = []
    now, num_drawn, state = 0.0, 0, 0
    while num_drawn < count:
        spell = float(rng.exponential(mean_spells[state]))
        times = now + spell * np.sort(rng.random(rng.poisson(rates[state] * spell)))
        arrivals.append(times)
        num_drawn += len(times)
        now += spell
        state = 1 - state
    return np.concatenate(arrivals)[:count]


def _check_rate(rate: float) -> None:
    if not (np.isfinite(rate) and rate > 0):
        raise ConfigError(f"rate is {rate:g}: it must be above 0 requests per second")
