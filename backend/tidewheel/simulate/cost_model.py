"""Time of a step from its contents.

seconds(step) = overhead + gemm(tokens) + kv_bytes · a + chunk_pairs · b + rows · c + samples · d + new_rows · e

*overhead* covers launches and reading the weights once. *gemm*, the rest of the matrix products, is piecewise linear
in the tokens and never falls: arithmetic adds time only once it outlasts reading the weights (roofline: Williams,
Waterman, Patterson, CACM 2009). *kv_bytes* is the cache that attention reads; *chunk_pairs* are (query, key) pairs of
prompt chunks, whose attention is bound by arithmetic. Host time between steps has two more terms.

Coefficients come from recorded runs (`calibration.fit`) or device figures (`CostModel.from_device`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from tidewheel.errors import ConfigError
from tidewheel.record.recorded_events import StepFeatures

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Coefficients in seconds per unit; raise `ConfigError` if one is negative or not finite."""

    name: str
    device: str = ""
    weights_bytes: float = 0.0  # informative: their time is in `overhead_s`
    kv_bytes_per_token: float = 1.0
    block_size: int = 64
    num_blocks: int = 8192
    overhead_s: float
    knots: tuple[int, ...] = ()  # tokens where the slope of `gemm` changes, rising
    seconds_per_token: tuple[float, ...] = (0.0,)  # slopes of `gemm`, from below the first knot to above the last
    seconds_per_kv_byte: float = 0.0
    seconds_per_chunk_pair: float = 0.0
    seconds_per_row: float = 0.0
    seconds_per_sample: float = 0.0
    seconds_per_new_row: float = 0.0
    turn_overhead_s: float = 0.0
    turn_seconds_per_row: float = 0.0
    fit: dict[str, float] = field(default_factory=dict)  # from `calibration.fit`

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(number) and number >= 0):
                    raise ConfigError(f"cost model {self.name!r}: {name} has {number!r}: it must be 0 or more")
        if len(self.seconds_per_token) != len(self.knots) + 1:
            raise ConfigError(
                f"cost model {self.name!r}: {len(self.knots)} knots need {len(self.knots) + 1} slopes in "
                f"seconds_per_token, not {len(self.seconds_per_token)}"
            )
        if list(self.knots) != sorted(set(self.knots)):
            raise ConfigError(f"cost model {self.name!r}: knots are {list(self.knots)}: they must rise")
        if self.block_size < 1 or self.num_blocks < 1:
            raise ConfigError(f"cost model {self.name!r}: block_size and num_blocks must be at least 1")
        if self.overhead_s + sum(self.seconds_per_token) <= 0:
            raise ConfigError(f"cost model {self.name!r}: overhead_s and seconds_per_token are 0: steps take no time")

    @classmethod
    def from_device(
        cls,
        name: str,
        *,
        num_parameters: float,
        weights_bytes: float,
        kv_bytes_per_token: float,
        bytes_per_s: float,
        flops_per_s: float,
        launch_s: float,
        **facts: object,
    ) -> CostModel:
        """Make a roofline from achieved bandwidth and arithmetic: two FLOPs per parameter and token."""
        reading_s = weights_bytes / bytes_per_s
        token_s = 2 * num_parameters / flops_per_s
        return cls(
            name=name,
            weights_bytes=weights_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            overhead_s=launch_s + reading_s,
            knots=(max(1, round(reading_s / token_s)),),
            seconds_per_token=(0.0, token_s),
            seconds_per_kv_byte=1 / bytes_per_s,
            **facts,  # type: ignore[arg-type]
        )

    @cached_property
    def _gemm_at_knots(self) -> tuple[float, ...]:
        total, previous, seconds = 0.0, 0, []
        for knot, slope in zip(self.knots, self.seconds_per_token, strict=False):
            total += slope * (knot - previous)
            seconds.append(total)
            previous = knot
        return tuple(seconds)

    def gemm_seconds(self, num_tokens: int) -> float:
        segment = bisect_right(self.knots, num_tokens)
        slope = self.seconds_per_token[segment]
        if segment == 0:
            return slope * num_tokens
        return self._gemm_at_knots[segment - 1] + slope * (num_tokens - self.knots[segment - 1])

    def step_seconds(self, step: StepFeatures) -> float:
        """Return seconds from start to tokens."""
        return (
            self.overhead_s
            + self.gemm_seconds(step.num_tokens)
            + self.seconds_per_kv_byte * self.kv_bytes_per_token * step.kv_tokens
            + self.seconds_per_chunk_pair * step.chunk_pairs
            + self.seconds_per_row * step.num_rows
            + self.seconds_per_sample * step.num_samples
            + self.seconds_per_new_row * step.num_new_rows
        )

    def turn_seconds(self, num_rows: int) -> float:
        """Return host seconds from a step's tokens to the next step."""
        return self.turn_overhead_s + self.turn_seconds_per_row * num_rows

    def save(self, path: Path) -> None:
        record = {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__dataclass_fields__}}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Load a saved model; raise `ConfigError` naming file and fault."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
            if record.pop("schema", None) != SCHEMA:
                raise ConfigError(f"its schema is not {SCHEMA}")
            return msgspec.convert(record, cls, strict=True)
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            raise ConfigError(f"cannot read the cost model {path}: {error}") from None


_COEFFICIENTS = (
    "weights_bytes", "kv_bytes_per_token", "overhead_s", "seconds_per_token", "seconds_per_kv_byte",
    "seconds_per_chunk_pair", "seconds_per_row", "seconds_per_sample", "seconds_per_new_row", "turn_overhead_s",
    "turn_seconds_per_row",
)  # fmt: skip

# Llama-3.1-8B, bfloat16, on one H200: 80 % and 60 % of the data sheet's 4.8 TB/s and 989 TFLOP/s (dense).
H200_8B = CostModel.from_device(
    "h200-8b",
    num_parameters=8.03e9,
    weights_bytes=16.06e9,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    bytes_per_s=0.8 * 4.8e12,
    flops_per_s=0.6 * 989e12,
    launch_s=1e-3,
    device="NVIDIA H200 (from its data sheet)",
    block_size=64,
    num_blocks=12_000,
)
BUILT_IN = {H200_8B.name: H200_8B}
