"""Measurements, and the ceilings of the device that they are compared with. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelled.roofline import Device

OURS = "tidewheel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    name: str
    case: str  # conditions: "32:8 heads, batch 128, context 2048"
    value: float
    unit: str
    samples: list[float]
    sample_unit: str = "s"
    who: str = OURS
    limit: float | None = None  # the device's most or least, in `unit`
    percent: float | None = None  # of the limit
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        percent = "" if self.percent is None else f"  {self.percent:5.1f} % of the limit"
        return f"{self.name:26s} {self.case:44s} {self.who:22s} {self.value:10.4g} {self.unit}{percent}"

    def to_json(self) -> dict[str, Any]:
        return {"type": "result", **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Measurement:
        return cls(**{f.name: record[f.name] for f in dataclasses.fields(cls)})


def throughput(
    name: str, case: str, seconds: list[float], amount: float, unit: str, limit: float | None, **rest: Any
) -> Measurement:
    """Return `amount` per median second; `limit` is the device's most."""
    value = amount / statistics.median(seconds)
    rest |= {"limit": limit, "percent": None if limit is None else 100.0 * value / limit}
    return Measurement(name=name, case=case, value=value, unit=unit, samples=seconds, **rest)


def duration(name: str, case: str, seconds: list[float], limit_s: float | None, **rest: Any) -> Measurement:
    """Return median milliseconds; `limit_s` is the device's least."""
    value = 1e3 * statistics.median(seconds)
    if limit_s is not None:
        rest |= {"limit": 1e3 * limit_s, "percent": 1e5 * limit_s / value}
    return Measurement(name=name, case=case, value=value, unit="ms", samples=seconds, **rest)


@dataclass(frozen=True, slots=True)
class Ceilings(Device):
    """Speeds of this device, in bytes and bf16 operations per second."""

    to_host: float = 0.0  # 0: not measured
    from_host: float = 0.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Ceilings:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]]) -> Ceilings:
        """Return the last ceilings that a stage noted, else those of an H200."""
        noted = [record["ceilings"] for record in records if record.get("are_measured")]
        return cls(**noted[-1]) if noted else cls()
