"""What the step model expects of this device for figures that have goals, as a range."""

from __future__ import annotations

from typing import NamedTuple

from modelled.roofline import SHAPES, Device, workload_seconds
from modelled.step_model import FACTORS, MAX_NUM_SEQS, Host, Model, Work, random_lengths

NO_HOST = Host(0.0, 0.0, 0.0)  # the device is the slower one


class Range(NamedTuple):
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"


def decode_step_ms(model: str, batch: int, context: float, device: Device) -> Range:
    return _step_ms(model, Work(batch, context), device)


def prompt_ms(model: str, length: int, device: Device) -> Range:
    return _step_ms(model, Work(0, 0.0, length, length * length / 2, 1), device)


def headline_percent(model: str, device: Device) -> Range:
    """Return the expected rate of 256 requests, all at once, in percent of the speed of light."""
    lengths = random_lengths()
    limit = sum(num_output for _, num_output in lengths) / workload_seconds(
        SHAPES[model], lengths, MAX_NUM_SEQS, device
    )
    slow, fast = (_model(model, end, device).workload_tokens_per_s(lengths) for end in ("slow", "fast"))
    return Range(100.0 * slow / limit, 100.0 * fast / limit)


def prompt_percent(device: Device) -> Range:
    """Return the expected rate of prompt attention in percent of the arithmetic."""
    found = FACTORS["prompt attention"]
    return Range(100.0 * found.slow / device.flops, 100.0 * found.fast / device.flops)


def percent_of_bandwidth(factor: str) -> Range:
    found = FACTORS[factor]
    return Range(100.0 * found.slow, 100.0 * found.fast)


def _step_ms(model: str, work: Work, device: Device) -> Range:
    fast, slow = (1e3 * _model(model, end, device).step(work).device_s for end in ("fast", "slow"))
    return Range(fast, slow)


def _model(name: str, end: str, device: Device) -> Model:
    return Model(SHAPES[name], NO_HOST, end, device=device)
