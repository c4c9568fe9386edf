"""Counters of a gateway's workers, and the Prometheus text of gateway and servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client import core as prometheus
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from tidewheel import metrics
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
