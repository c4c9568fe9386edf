"""Counters of a gateway's workers, and the Prometheus text of gateway and servers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import core as prometheus
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from tidewheel import metrics
from tidewheel.gateway.api_keys import Ledger
from tidewheel.private_dir import read_value, write_value
from tidewheel_client.errors import RequestError, WrongKey

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counters(msgspec.Struct):
    requests: dict[str, int] = {}  # by "path status"
    errors: dict[str, int] = msgspec.field(default_factory=lambda: {WrongKey.tag: 0})  # by tag, else class
    num_open: int = 0
    num_hang_ups: int = 0
    num_moved: int = 0
    open_upstream: dict[str, int] = {}  # requests by server's authority

    def count_error(self, error: RequestError) -> None:
        self.errors[error.label] = self.errors.get(error.label, 0) + 1

    @classmethod
    def sum_of(cls, each: Iterable[Counters]) -> Counters:
        total = cls()
        for one in each:
            for name in cls.__struct_fields__:
                value = getattr(total, name)
                if isinstance(value, dict):
                    value = Counter(value)
                    value.update(getattr(one, name))  # unlike `+`, keeps zeros
                else:
                    value += getattr(one, name)
                setattr(total, name, value)
        return total

    def render(self, upstream_ready: Mapping[str, bool]) -> str:
        return generate_latest(_Collector(self, upstream_ready)).decode()


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """Gateway worker and the folder in which workers share key use and counters; a single worker has none."""

    folder: Path | None = None
    index: int = 0
    num_workers: int = 1

    def ledger(self) -> Ledger:
        return Ledger() if self.folder is None else Ledger(self.folder / "ledger", self.index)

    def is_listening(self) -> bool:
        return self.folder is None or self._path(self.index).exists()

    def publish(self, counters: Counters) -> None:
        """Write the counters for other workers. On a full disk, older counters stay."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                write_value(self._path(self.index), counters)

    def before(self) -> Counters:
        """Return counters of this worker's former process, so that totals never fall."""
        counters = self._read(self.index)
        return msgspec.structs.replace(counters, num_open=0, open_upstream={})

    def others(self) -> list[Counters]:
        return [self._read(index) for index in range(self.num_workers) if index != self.index]

    def _read(self, index: int) -> Counters:
        return (None if self.folder is None else read_value(self._path(index), Counters)) or Counters()

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index}.json"


@dataclass
class _Collector(Collector):
    figures: Counters
    ready: Mapping[str, bool]  # by authority

    def collect(self) -> Iterator[prometheus.Metric]:
        for metric in metrics.select("gateway"):
            figure = getattr(self.figures, str(metric.source))
            yield _family(metric, figure if isinstance(figure, dict) else {"": figure})
        yield _family(metrics.UPSTREAM_READY, self.ready)


def _family(metric: metrics.Metric, values: Mapping[str, int]) -> prometheus.Metric:
    labels = metric.label.split(" and ") if metric.label else []
    is_counter = metric.kind == "counter"
    kind = prometheus.CounterMetricFamily if is_counter else prometheus.GaugeMetricFamily
    family: prometheus.CounterMetricFamily | prometheus.GaugeMetricFamily = kind(
        metric.name, metric.help, labels=labels
    )
    for label_values, value in values.items():
        family.add_metric(label_values.rsplit(" ", len(labels) - 1) if labels else (), value)
    return family


def merge(texts: Mapping[str, str]) -> str:
    """Join Prometheus texts of servers: each metric once, each sample with the label `upstream`.

    No parser: it would rename Triton's counters, which do not end with `_total`.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    families: dict[str, dict[str, None]] = {}  # lines, each once
    for upstream, text in texts.items():
        family = ""
        for line in filter(None, text.splitlines()):
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
            families.setdefault(family, {})[line if line[0] == "#" else _labelled(line, upstream)] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(sample: str, upstream: str) -> str:
    name, value = sample.rsplit(" ", 1)
    label = f'upstream="{upstream}"'
    return f"{name[:-1]},{label}}} {value}" if name.endswith("}") else f"{name}{{{label}}} {value}"
