import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.batch import BoolArray, Int32Array
from tidewheel.config import Kind
from tidewheel.errors import ConfigError
from tidewheel.request import Priority, RequestObjective
from tidewheel.workload.arrivals import FloatArray
from tidewheel.workload.lengths import Lengths

NOBODY = -1  # no session or prefix group


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests as arrays [n] in order of arrival. Names are indices into tuples; the empty name means none."""

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
    deadlines: FloatArray  # seconds after arrival; inf: none
    ttft_objectives: FloatArray  # seconds after arrival; inf: none
    tpot_objectives: FloatArray  # seconds a token; inf: none
    encoder_tokens: Int32Array  # of requests with audio
    buckets: Int32Array  # of requests without text
    bucket_names: tuple[str, ...] = ("",)
    pauses: FloatArray  # seconds from the end of the session's turn before to the arrival; NaN: at `arrivals`
    tools: Int32Array  # tool that runs after the request, until the session's next turn
    tool_names: tuple[str, ...] = ("",)
    loras: Int32Array  # adapters
    lora_names: tuple[str, ...] = ("",)

    @classmethod
    def of(
        cls, arrivals: npt.ArrayLike, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, **others: Any
    ) -> "Trace":
        """Return a trace. Absent arrays mean class NORMAL, and no tenants, sessions, prefixes or deadlines."""
        values: dict[str, Any] = {name: np.full(np.size(arrivals), value) for name, value in _DEFAULTS.items()}
        values |= {"arrivals": arrivals, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, **others}
        return cls(**{name: _column(name, value) for name, value in values.items()})

    def tenant(self, index: int) -> str:
        return self.tenant_names[int(self.tenants[index])]

    def bucket(self, index: int) -> str:
        return self.bucket_names[int(self.buckets[index])]

    def tool(self, index: int) -> str:
        return self.tool_names[int(self.tools[index])]

    def lora(self, index: int) -> str:
        return self.lora_names[int(self.loras[index])]

    def next_turns(self) -> dict[int, int]:
        """Return by request the session's next one, if that arrives a pause after it."""
        follows = np.isfinite(self.pauses)
        latest: dict[int, int] = {}
        next_turns: dict[int, int] = {}
        for index, session in enumerate(self.sessions.tolist() if follows.any() else ()):
            if follows[index]:
                next_turns[latest[session]] = index
            latest[session] = index
        return next_turns

    def session(self, index: int) -> str:
        return "" if self.sessions[index] == NOBODY else self.session_names[self.sessions[index]]

    def objective(self, index: int) -> RequestObjective | None:
        return RequestObjective.of(float(self.ttft_objectives[index]), float(self.tpot_objectives[index]))

    def prefix_group(self, index: int) -> str:
        return "" if self.prefix_groups[index] == NOBODY else self.prefix_names[self.prefix_groups[index]]

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def rate(self) -> float:
        span = float(self.arrivals[-1] - self.arrivals[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span > 0 else 0.0

    @property
    def max_num_tokens(self) -> int:
        return int((self.prompt_tokens + self.output_tokens).max())

    def at_rate(self, rate: float) -> "Trace":
        """Return the requests with arrivals stretched to another rate. Raise `ConfigError` if all arrive at once."""
        if not self.rate:
            raise ConfigError("all requests of the trace arrive at one moment: it has no rate to change")
        return dataclasses.replace(self, arrivals=self.arrivals / (rate / self.rate))

    def without_text(self, kind: Kind) -> "Trace":
        """Return the requests as those of a one-shot model, whose prompts are items, or with outputs as steps."""
        ones, names = np.ones_like(self.output_tokens), tuple(name or "-" for name in self.bucket_names)
        changes: dict[str, Any] = {"output_tokens" if kind == "one_shot" else "prompt_tokens": ones}
        return dataclasses.replace(self, bucket_names=names, **changes)

    def at_once(self, count: int) -> "Trace":
        columns: dict[str, Any] = {"arrivals": np.zeros(count), "pauses": np.full(count, np.nan)}
        columns |= dict.fromkeys(_LIMITS, np.full(count, np.inf))
        return dataclasses.replace(self._rows(np.arange(count) % len(self)), **columns)

    def taken(self, chosen: BoolArray) -> "Trace":
        """Return the chosen requests, the first at 0. A turn without an earlier one comes at its own arrival."""
        trace = self._rows(np.flatnonzero(chosen))
        sessions, turns = np.unique(trace.sessions, return_index=True)
        pauses = trace.pauses.copy()
        pauses[turns[sessions != NOBODY]] = np.nan
        return dataclasses.replace(trace, arrivals=trace.arrivals - trace.arrivals[0], pauses=pauses)

    def _rows(self, index: npt.NDArray[np.intp]) -> "Trace":
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        columns: dict[str, Any] = {n: value[index] for n, value in values.items() if isinstance(value, np.ndarray)}
        return dataclasses.replace(self, **columns)


_LIMITS = ("deadlines", "ttft_objectives", "tpot_objectives")
_DEFAULTS = {
    "priorities": Priority.NORMAL, "tenants": 0, "sessions": NOBODY, "prefix_groups": NOBODY, "prefix_tokens": 0,
    "encoder_tokens": 0, "buckets": 0, "pauses": math.nan, "tools": 0, "loras": 0,
    **dict.fromkeys(_LIMITS, math.inf),
}  # fmt: skip


def _column(name: str, value: Any) -> Any:
    if name.endswith("_names"):
        return value
    return np.asarray(value, dtype=np.float64 if name in ("arrivals", "pauses", *_LIMITS) else np.int32)


class PrefixMix(NamedTuple):
    num_groups: int
    num_tokens: int


class TenantMix(NamedTuple):
    names: tuple[str, ...] = ("",)
    shares: tuple[float, ...] = (1.0,)
    priorities: tuple[Priority, ...] = (Priority.NORMAL,)


def synthesise(
    arrivals: FloatArray,
    prompt: Lengths,
    output: Lengths,
    rng: np.random.Generator,
    *,
    tenants: TenantMix = TenantMix(),  # noqa: B008 - immutable
    prefixes: PrefixMix | None = None,
) -> Trace:
    count, shares = len(arrivals), np.array(tenants.shares) / sum(tenants.shares)
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


_POOL_SIZE = 1 << 22
_STRIDE = 0x9E3779B1  # odd, so its first `_POOL_SIZE` multiples differ


class TokenContents:
    """Random token ids above 0 as views of one pool: prompts take no memory, a session's turns begin alike."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        pool = np.random.default_rng(0).integers(1, 2**31 - 1, _POOL_SIZE, dtype=np.int32)
        self.pool: Int32Array = np.concatenate((pool, pool[: trace.max_num_tokens + 1]))

    def offset(self, index: int) -> int:
        session = int(self._trace.sessions[index])
        return _offset(2 * session + 1 if session != NOBODY else 2 * index)

    def prompt(self, index: int) -> Int32Array:
        offset, end = self.offset(index), int(self._trace.prompt_tokens[index])
        own = self.pool[offset : offset + end]
        num_shared = int(self._trace.prefix_tokens[index])
        if not num_shared:
            return own
        shared = _offset(-2 * int(self._trace.prefix_groups[index]) - 2)
        return np.concatenate((self.pool[shared : shared + num_shared], own[num_shared:]))


def _offset(number: int) -> int:
    return number * _STRIDE % _POOL_SIZE
