import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidewheel.batch import Int32Array
from tidewheel.errors import ConfigError

KINDS = ("constant", "uniform", "geometric", "lognormal", "pareto")
SYNTAX = "KIND:MEAN[:SHAPE[:MAX]]"

_DEFAULT_SHAPE = {"lognormal": 1.0, "pareto": 2.5}


@dataclass(frozen=True, slots=True)
class LengthRange:
    low: int
    high: int

    def draw(self, count: int, rng: np.random.Generator) -> Int32Array:
        return rng.integers(self.low, self.high + 1, count, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts, up to `maximum`; `shape`: sigma of a lognormal, tail index of a Pareto type I."""

    kind: str
    mean: float
    shape: float = 1.0
    maximum: int = 1 << 20

    @classmethod
    def parse(cls, text: str, *, name: str) -> "Lengths":
        """Parse a distribution such as ``lognormal:128:1.0:4096``. Raise `ConfigError` with `name`."""
        kind, *numbers = text.split(":")
        if kind not in KINDS:
            raise ConfigError(f"{name} is {text!r}: write {SYNTAX} with one of {', '.join(KINDS)}")
        try:
            mean, shape, maximum = _numbers(kind, numbers)
        except ValueError:
            raise ConfigError(f"{name} is {text!r}: write {SYNTAX}, numbers after the kind") from None
        lengths = cls(kind, mean, shape, maximum)
        lengths.check(name)
        return lengths

    def check(self, name: str) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise ConfigError(f"{name}: the mean is {self.mean:g}: it must be at least 1 token")
        if self.maximum < self.mean:
            raise ConfigError(f"{name}: the maximum is {self.maximum}: it must be at least the mean {self.mean:g}")
        if self.kind == "lognormal" and not 0 < self.shape <= 4:
            raise ConfigError(f"{name}: sigma is {self.shape:g}: it must be above 0 and at most 4")
        if self.kind == "pareto" and not 1 < self.shape <= 100:
            raise ConfigError(f"{name}: the tail index is {self.shape:g}: it must be above 1 and at most 100")

    def draw(self, count: int, rng: np.random.Generator) -> Int32Array:
        values = self._raw(count, rng)
        if self.kind in _DEFAULT_SHAPE:
            values *= self._scale()
        return np.clip(np.rint(values), 1, self.maximum).astype(np.int32)

    def _raw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        match self.kind:
            case "constant":
                return np.full(count, self.mean)
            case "uniform":
                return rng.integers(1, round(2 * self.mean), count).astype(np.float64)
            case "geometric":
                return rng.geometric(1 / self.mean, count).astype(np.float64)
            case "lognormal":
                return np.asarray(self.mean * np.exp(rng.normal(-(self.shape**2) / 2, self.shape, count)))
            case _:
                return np.asarray(self.mean * (self.shape - 1) / self.shape * (1 + rng.pareto(self.shape, count)))

    def _scale(self) -> float:
        sample = self._raw(1 << 16, np.random.default_rng(0))
        low, high = 1.0, 1.0
        while np.minimum(sample * high, self.maximum).mean() < self.mean and high < 1e6:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            if np.minimum(sample * middle, self.maximum).mean() < self.mean:
                low = middle
            else:
                high = middle
        return high


def _numbers(kind: str, texts: list[str]) -> tuple[float, float, int]:
    if not 1 <= len(texts) <= 3:
        raise ValueError
    mean = float(texts[0])
    shape = float(texts[1]) if len(texts) > 1 and texts[1] else _DEFAULT_SHAPE.get(kind, 1.0)
    maximum = int(texts[2]) if len(texts) > 2 else 1 << 20
    return mean, shape, maximum
