from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import MAX_CONTEXT, ConfigFields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    rope_type: str
    theta: float
    factor: float = 1.0
    original_context: int = 0  # before scaling; llama3 and yarn
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # factor of cosines and sines
    truncate: bool = True

    @property
    def extended_context(self) -> int:
        """Number of positions after RoPE scaling, or 0 without scaling."""
        return int(min(self.original_context * self.factor, MAX_CONTEXT)) if self.rope_type == "yarn" else 0


def parse_rope(fields: ConfigFields) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4)."""
    merged = ConfigFields(
        {**fields.section("rope_scaling").values, **fields.section("rope_parameters").values},
        f"{fields.where}: rope parameters",
    )
    rope_type = merged.text("rope_type", merged.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"{merged.where}: rope_type {rope_type!r} is not offered; known: {', '.join(ROPE_TYPES)}")
    if merged.number("partial_rotary_factor", 1.0) != 1.0 or fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{merged.where}: partial_rotary_factor is not offered for this architecture")
    theta = merged.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if theta <= 1.0:
        raise ConfigError(f"{merged.where}: rope_theta is {theta:g}, it must be above 1")
    rope = RopeConfig(rope_type=rope_type, theta=theta)
    return rope if rope_type == "default" else _with_scaling(rope, fields, merged)


def _with_scaling(rope: RopeConfig, fields: ConfigFields, merged: ConfigFields) -> RopeConfig:
    if rope.rope_type == "linear":
        return replace(rope, factor=merged.number("factor"))
    context = fields.integer("max_position_embeddings")
    original = merged.integer("original_max_position_embeddings", context)
    if rope.rope_type == "llama3":
        low, high = merged.number("low_freq_factor"), merged.number("high_freq_factor")
        if high <= low:
            raise ConfigError(f"{merged.where}: high_freq_factor {high} must be above low_freq_factor {low}")
        factor = merged.number("factor")
        return replace(rope, factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high)
    if merged.values.get("mscale_all_dim"):
        raise merged.error("mscale_all_dim", "left out: it is not offered for this architecture")
    factor = merged.number("factor", context / original)
    return replace(
        rope, factor=factor, original_context=original,
        beta_fast=merged.number("beta_fast", 32.0), beta_slow=merged.number("beta_slow", 1.0),
        attention_factor=merged.number("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),  # section 3.4
        truncate=merged.flag("truncate", True),
    )  # fmt: skip


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2] float32, in radians per position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    if rope.rope_type == "yarn":
        return _yarn(plain, rope, rotary_dim)
    return plain


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow down long waves, keep short ones, and blend between (`apply_scaling` of Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_context / wavelength - low) / (high - low)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Blend interpolated and plain frequencies (YaRN, Peng et al. 2023, section 3.2, "NTK-by-parts")."""

    def dimension(rotations: float) -> float:
        return rotary_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of 0 / 0
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def cos_sin_table(rope: RopeConfig, rotary_dim: int, length: int, device: torch.device) -> torch.Tensor:
    """Return [length, rotary_dim] float32: cosines, then sines."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, rotary_dim))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)
