"""Time of a step from its contents.

    seconds(step) = overhead + gemm(tokens) + kv_bytes · a + chunk_pairs · b + rows · c + samples · d + new_rows · e
                  + encoder_tokens · f + swapped_bytes · h + most_drafts · i

*overhead* includes reading the weights; *gemm*, the products' time beyond that, is piecewise linear and never falls
(roofline: Williams, Waterman, Patterson, CACM 2009). A step without text, of a shape that was measured, takes
overhead + tokens · g of its shape.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from tidewheel.batch import WeightVariant
from tidewheel.config import CacheDType
from tidewheel.errors import ConfigError
from tidewheel.record.recorded_events import StepFeatures

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Coefficients of a step's time. Raise `ConfigError` if one is negative or not finite."""

    name: str
    device: str = ""
    weights_bytes: float = 0.0  # read in `overhead_s`
    kv_bytes_per_token: float = 1.0
    kv_element_bytes: int = 2
    block_size: int = 64
    num_blocks: int = 8192
    overhead_s: float
    knots: tuple[int, ...] = ()  # tokens where the slope of `gemm` changes
    seconds_per_token: tuple[float, ...] = (0.0,)  # one more than knots
    seconds_per_kv_byte: float = 0.0
    seconds_per_chunk_pair: float = 0.0
    seconds_per_row: float = 0.0
    seconds_per_sample: float = 0.0
    seconds_per_new_row: float = 0.0
    seconds_per_encoder_token: float = 0.0
    seconds_per_swapped_byte: float = 0.0  # between KV cache and host tier, one way
    shapes: dict[str, tuple[float, float]] = field(default_factory=dict)  # overhead and seconds per token, by bucket
    quantized_share: float | None = None  # of overhead and gemm, with quantised weights; None: not measured
    draft_acceptance: float | None = None  # chance that a draft is right after right ones; None: not measured
    seconds_per_draft: float = 0.0  # of the row with the most: what drafts them, one after another
    turn_overhead_s: float = 0.0
    turn_seconds_per_row: float = 0.0
    fit: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ConfigError(f"cost model {self.name!r}: {fault}")

    def _faults(self) -> Iterator[str]:
        for name in self.__dataclass_fields__:
            value = sum(self.shapes.values(), ()) if name == "shapes" else getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
                    yield f"{name} has {number!r}: it must be 0 or more"
        num_knots, num_slopes = len(self.knots), len(self.seconds_per_token)
        if num_slopes != num_knots + 1:
            yield f"{num_knots} knots need {num_knots + 1} slopes in seconds_per_token, not {num_slopes}"
        if list(self.knots) != sorted(set(self.knots)):
            yield f"knots are {list(self.knots)}: they must rise"
        if min(self.block_size, self.num_blocks, self.kv_element_bytes) < 1:
            yield "block_size, num_blocks and kv_element_bytes must be at least 1"
        if self.quantized_share == 0:
            yield "quantized_share is 0: it must be above 0"
        if self.draft_acceptance is not None and self.draft_acceptance > 1:
            yield f"draft_acceptance is {self.draft_acceptance:g}: it must be 0 to 1"
        if self.overhead_s + sum(self.seconds_per_token) <= 0:
            yield "overhead_s and seconds_per_token are 0: steps take no time"

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
    ) -> "CostModel":
        """Return a roofline model from achieved rates, with two FLOPs per parameter and token."""
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

    def with_cache(self, kv_cache_dtype: CacheDType) -> "CostModel":
        """Return the model with this KV cache; 8-bit elements mean less to read and more blocks."""
        if kv_cache_dtype == "auto":
            return self
        factor = self.kv_element_bytes
        return dataclasses.replace(
            self,
            kv_bytes_per_token=self.kv_bytes_per_token / factor,
            kv_element_bytes=1,
            num_blocks=self.num_blocks * factor,
        )

    def gemm_seconds(self, num_tokens: int) -> float:
        edges = pairwise((0, *self.knots, math.inf))
        spans = (min(num_tokens, high) - low for low, high in edges if low < num_tokens)
        return sum(slope * span for slope, span in zip(self.seconds_per_token, spans, strict=False))

    def weight_seconds(self, step: StepFeatures) -> float:
        return self.overhead_s + self.gemm_seconds(step.num_tokens)

    def step_seconds(self, step: StepFeatures, weights: WeightVariant = "full") -> float:
        if step.shape in self.shapes:
            overhead_s, token_s = self.shapes[step.shape]
            return overhead_s + token_s * step.num_tokens
        return (
            self.weight_seconds(step) * (self.quantized_share or 1.0 if weights == "quantized" else 1.0)
            + self.seconds_per_kv_byte * self.kv_bytes_per_token * step.kv_tokens
            + self.seconds_per_chunk_pair * step.chunk_pairs
            + self.seconds_per_row * step.num_rows
            + self.seconds_per_sample * step.num_samples
            + self.seconds_per_new_row * step.num_new_rows
            + self.seconds_per_encoder_token * step.encoder_tokens
        )

    def swap_seconds(self, num_blocks: int, block_size: int) -> float:
        return num_blocks * block_size * self.kv_bytes_per_token * self.seconds_per_swapped_byte

    def turn_seconds(self, num_rows: int) -> float:
        return self.turn_overhead_s + self.turn_seconds_per_row * num_rows

    def save(self, path: Path) -> None:
        record = {"schema": SCHEMA, **asdict(self)}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        try:
            record = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
            if record.pop("schema", None) != SCHEMA:
                raise ConfigError(f"its schema is not {SCHEMA}")
            return msgspec.convert(record, cls, strict=True)
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            raise ConfigError(f"cannot read the cost model {path}: {error}") from None


# Llama-3.1-8B, bfloat16, one H200: 80 % of 4.8 TB/s and of PCIe's 64 GB/s, 60 % of 989 TFLOP/s (dense).
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
    seconds_per_swapped_byte=1 / (0.8 * 64e9),
)
BUILT_IN = {H200_8B.name: H200_8B}
