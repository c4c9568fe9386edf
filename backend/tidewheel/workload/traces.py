"""Traces of requests, and synthetic ones from a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.request import Priority
from tidewheel.workload.arrival_times import FloatArray
from tidewheel.workload.lengths import Int32Array, Lengths

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

    @classmethod
    def of(
        cls, arrivals: npt.ArrayLike, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, **others: Any
    ) -> Trace:
        """Return a trace, by default of one tenant in class NORMAL, without sessions, prefixes and deadlines."""
        values: dict[str, Any] = {name: np.full(np.size(arrivals), value) for name, value in _DEFAULTS.items()}
        values |= {"arrivals": arrivals, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, **others}
        return cls(**{name: _column(name, value) for name, value in values.items()})

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


_DEFAULTS = {
    "priorities": Priority.NORMAL, "tenants": 0, "sessions": NOBODY, "prefix_groups": NOBODY, "prefix_tokens": 0,
    "deadlines": math.inf,
}  # fmt: skip


def _column(name: str, value: Any) -> Any:
    if name.endswith("_names"):
        return value
    return np.asarray(value, dtype=np.float64 if name in ("arrivals", "deadlines") else np.int32)


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
    tenant_index = rng.choice(len(shares), size=count, p=shares)
    prompt_tokens = prompt.draw(count, rng)
    columns: dict[str, Any] = {}
    if prefixes is not None:
        weights = 1 / np.arange(1, prefixes.num_groups + 1)
        columns["prefix_groups"] = rng.choice(prefixes.num_groups, size=count, p=weights / weights.sum())
        columns["prefix_names"] = tuple(f"group-{index}" for index in range(prefixes.num_groups))
        columns["prefix_tokens"] = np.full(count, prefixes.num_tokens)
        prompt_tokens += np.int32(prefixes.num_tokens)
    return Trace.of(
        arrivals,
        prompt_tokens,
        output.draw(count, rng),
        priorities=np.array(tenants.priorities)[tenant_index],
        tenants=tenant_index,
        tenant_names=tenants.names,
        **columns,
    )
