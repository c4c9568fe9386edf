"""Counters of a gateway's worker, and Prometheus' text of them and of the servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import core as prometheus

from tidewheel import metrics
from tidewheel_client.errors import RequestError, WrongKey

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Values = Iterable[tuple[Sequence[str], int]]  # by the values of labels


class Counters(msgspec.Struct):
    """Figures of one worker or several."""

    requests: dict[str, int] = {}  # by "path status"
    errors: dict[str, int] = {}  # by tag, else class
    num_open: int = 0
    num_hang_ups: int = 0
    num_moved: int = 0
    open_upstream: dict[str, int] = {}  # requests by server's authority

    def count(self, path: str, status: int) -> None:
        key = f"{path} {status}"
        self.requests[key] = self.requests.get(key, 0) + 1

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
        registry = CollectorRegistry()
        registry.register(_Collector(self, upstream_ready))
        return generate_latest(registry).decode()


class _Collector:
    def __init__(self, counters: Counters, ready: Mapping[str, bool]) -> None:
        self._counters = counters
        self._ready = ready  # by authority

    def collect(self) -> Iterator[prometheus.Metric]:
        figures = self._counters
        requests = [(key.rsplit(" ", 1), count) for key, count in figures.requests.items()]
        errors = {WrongKey.tag: 0} | figures.errors
        yield _family(metrics.GATEWAY_REQUESTS, requests, "path", "status")
        yield _family(metrics.GATEWAY_ERRORS, _labelled_values(errors), "tag")
        yield _family(metrics.GATEWAY_OPEN, [((), figures.num_open)])
        yield _family(metrics.GATEWAY_HANG_UPS, [((), figures.num_hang_ups)])
        yield _family(metrics.GATEWAY_MOVED, [((), figures.num_moved)])
        yield _family(metrics.UPSTREAM_READY, _labelled_values(self._ready), "upstream")
        yield _family(metrics.UPSTREAM_OPEN, _labelled_values(figures.open_upstream), "upstream")


def _labelled_values(values: Mapping[str, int]) -> Values:
    return [((label,), value) for label, value in values.items()]


def _family(metric: metrics.Metric, values: Values, *labels: str) -> prometheus.Metric:
    is_counter = metric.kind == "counter"
    kind = prometheus.CounterMetricFamily if is_counter else prometheus.GaugeMetricFamily
    family: prometheus.CounterMetricFamily | prometheus.GaugeMetricFamily = kind(
        metric.name, metric.help, labels=labels
    )
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def merge(texts: Mapping[str, str]) -> str:
    """Join servers' texts: a family once, each sample with the label `upstream`.

    No parser: it would rename Triton's counters, which do not end with `_total`.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    families: dict[str, list[str]] = {}
    for upstream, text in texts.items():
        for family, line in _lines_by_family(text.splitlines()):
            lines = families.setdefault(family, [])
            if not line.startswith("#"):
                lines.append(_labelled(line, upstream))
            elif line not in lines:
                lines.append(line)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _lines_by_family(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    family = ""
    for line in filter(None, lines):
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
        yield family, line


def _labelled(sample: str, upstream: str) -> str:
    name, value = sample.rsplit(" ", 1)
    label = f'upstream="{upstream}"'
    return f"{name[:-1]},{label}}} {value}" if name.endswith("}") else f"{name}{{{label}}} {value}"
