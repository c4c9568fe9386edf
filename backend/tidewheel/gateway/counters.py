import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import core as prometheus
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from tidewheel import metrics
from tidewheel.gateway.api_keys import Ledger
from tidewheel.private_dir import read_value, write_value
from tidewheel_client.errors import WrongKey

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS = [metric for metric in metrics.TABLE if metric.owner == "gateway"]
Counts = Counter[str]  # by series


def series(metric: metrics.Metric, *labels: str) -> str:
    """Return a series' key: the metric's name and the values of its labels."""
    return " ".join((metric.name, *labels))


WRONG_KEYS = series(metrics.GATEWAY_ERRORS, WrongKey.tag)
# Shown from the start.
_ZEROS = dict.fromkeys((WRONG_KEYS, *(series(metric) for metric in _METRICS if not metric.label)), 0)


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """Gateway worker. `folder`: where workers share key use and counts; None: a single worker."""

    folder: Path | None = None
    index: int = 0
    num_workers: int = 1

    def ledger(self) -> Ledger:
        return Ledger() if self.folder is None else Ledger(self.folder / "ledger", self.index)

    def is_listening(self) -> bool:
        return self.folder is None or self._path(self.index).exists()

    def publish(self, counts: Counts) -> None:
        """Write the counts for other workers. On a full disk, older counts stay."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                write_value(self._path(self.index), counts)

    def before(self) -> Counts:
        """Return the counts of this worker's previous process, without gauges."""
        counts = self._read(self.index)
        return Counts({key: count for key, count in counts.items() if key.partition(" ")[0].endswith("_total")})

    def others(self) -> list[Counts]:
        return [self._read(index) for index in range(self.num_workers) if index != self.index]

    def _read(self, index: int) -> Counts:
        return Counts((None if self.folder is None else read_value(self._path(index), dict[str, int])) or {})

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index}.json"


@dataclass
class _Collector(Collector):
    counts: Mapping[str, int]

    def collect(self) -> Iterator[prometheus.Metric]:
        for metric in _METRICS:
            labels = metric.label.split(" and ") if metric.label else []
            kind = prometheus.CounterMetricFamily if metric.kind == "counter" else prometheus.GaugeMetricFamily
            family: Any = kind(metric.name, metric.help, labels=labels)
            for key, count in self.counts.items():
                name, *values = key.split(" ")
                if name == metric.name:
                    family.add_metric(values, count)
            yield family


def render(counts: Mapping[str, int]) -> str:
    return generate_latest(_Collector({**_ZEROS, **counts})).decode()
