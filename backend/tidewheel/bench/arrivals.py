"""Times at which a benchmark sends requests."""

import math
import random
from dataclasses import dataclass

import numpy as np

from tidewheel.bench import BenchError
from tidewheel.workload.arrivals import bursty_arrivals, poisson_until

SYNTAX = "closed:N, poisson:RATE, burst:RATE[:BURSTINESS], ramp:LOW:HIGH[:STEPS], trace[:SPEED] or all"
MAX_RATE = 100_000.0  # requests/s that one client can send
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class LoadPattern:
    """Pace of a run. `value` by `kind`: closed: requests in flight; poisson, burst: requests/s; trace: speed-up; all:
    unused.
    """

    kind: str
    value: float = 0.0
    burstiness: float = 4.0  # gap variance over Poisson's

    def __str__(self) -> str:
        return {
            "closed": f"{self.value:g} in flight",
            "poisson": f"{self.value:g}/s",
            "burst": f"{self.value:g}/s in bursts",
            "trace": f"trace x{self.value:g}",
            "all": "all at once",
        }[self.kind]

    @property
    def rate(self) -> float | None:
        return self.value if self.kind in ("poisson", "burst") else None

    def times(self, seconds: float, seed: int) -> list[float]:
        assert self.rate is not None
        if self.kind == "poisson":
            return poisson_until(seconds, self.rate, random.Random(seed))  # noqa: S311 - a load
        rng = np.random.default_rng(seed)
        count = int(self.rate * seconds * 1.5) + 64
        times = bursty_arrivals(count, self.rate, rng, burstiness=self.burstiness)
        return [float(at) for at in times if at < seconds]


def parse_loads(text: str, seconds: float) -> list[LoadPattern]:
    """Return the load patterns of an option; a ramp gives several. Raise `BenchError`."""
    kind, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        kind, numbers = "", []
    match kind, numbers:
        case "closed", [users]:
            return [LoadPattern(kind, _whole(users, text))]
        case "poisson", [rate]:
            return [LoadPattern(kind, _checked_rate(rate, seconds, text))]
        case "burst", [rate, *_] if len(numbers) < 3:
            burstiness = numbers[1] if len(numbers) > 1 else 4.0
            if not 1.0 <= burstiness <= 1000.0:
                raise BenchError(f"--load {text!r}: burstiness is {burstiness:g}: it must be 1 (Poisson) to 1000")
            return [LoadPattern(kind, _checked_rate(rate, seconds, text), burstiness)]
        case "ramp", [low, high, *_] if len(numbers) < 4:
            rates = _ramp(low, high, _whole(numbers[2] if len(numbers) > 2 else 6, text), text)
            return [LoadPattern("poisson", _checked_rate(rate, seconds, text)) for rate in rates]
        case "trace", [] | [_]:
            speed = numbers[0] if numbers else 1.0
            if not 0.0 < speed <= 1e6:
                raise BenchError(f"--load {text!r}: the speed is {speed:g}: it must be above 0")
            return [LoadPattern(kind, speed)]
        case "all", []:
            return [LoadPattern(kind)]
    raise BenchError(f"--load {text!r}: write {SYNTAX}")


def _ramp(low: float, high: float, steps: int, text: str) -> list[float]:
    if not low < high or steps < 3:
        raise BenchError(f"--load {text!r}: a ramp must rise, in at least 3 steps")
    return [round(low + (high - low) * step / (steps - 1), 4) for step in range(steps)]


def _checked_rate(rate: float, seconds: float, text: str) -> float:
    if not (math.isfinite(rate) and 0.0 < rate <= MAX_RATE):
        raise BenchError(
            f"--load {text!r}: the rate is {rate:g} requests/s: it must be above 0, {MAX_RATE:g} at most"
        )
    if rate * seconds > MAX_REQUESTS:
        raise BenchError(
            f"--load {text!r}: {rate:g} requests/s for {seconds:g} s are {rate * seconds:,.0f} requests: "
            f"{MAX_REQUESTS:,} at most; lower the rate or --seconds"
        )
    return rate


def _whole(number: float, text: str) -> int:
    if number != int(number) or not 1 <= number <= 65_536:
        raise BenchError(f"--load {text!r}: {number:g} is no whole number from 1 to 65536")
    return int(number)
