"""The gateway's own figures, beside those of its servers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tidewheel.gateway.upstream import Upstream
from tidewheel.gateway.upstreams import Upstreams
from tidewheel_client.errors import RequestError, WrongKey

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counters(msgspec.Struct):
    """Figures of a worker, or of several together."""

    requests: dict[str, int] = {}  # by labels: path and status
    errors: dict[str, int] = {}  # by tag, or class of an error without one
    num_open: int = 0
    num_hang_ups: int = 0  # requests whose client went away
    num_moved: int = 0  # requests that a server refused and another one got
    open_upstream: dict[str, int] = {}  # requests that a server works on

    def count(self, path: str, status: int) -> None:
        labels = f'path="{path}",status="{status}"'
        self.requests[labels] = self.requests.get(labels, 0) + 1

    def count_error(self, error: RequestError) -> None:
        self.errors[error.label] = self.errors.get(error.label, 0) + 1

    def render(self, upstreams: Upstreams) -> str:
        ready = {_of_upstream(one): int(not one.not_ready) for one in upstreams.each}
        errors = {f'tag="{label}"': count for label, count in ({WrongKey.tag: 0} | self.errors).items()}
        families = (
            ("requests_total", "counter", "answered requests", self.requests),
            ("errors_total", "counter", "requests that ended with an error", errors),
            ("open_requests", "gauge", "requests without a whole answer", {"": self.num_open}),
            ("hang_ups_total", "counter", "requests whose client went away", {"": self.num_hang_ups}),
            ("moved_total", "counter", "requests that went on to another server", {"": self.num_moved}),
            ("upstream_ready", "gauge", "1 for a server that takes requests", ready),
            ("upstream_open_requests", "gauge", "requests that a server works on", self.open_upstream),
        )
        return "".join(_family(*family) for family in families)

    def with_upstreams(self, upstreams: Upstreams) -> Counters:
        open_upstream = {_of_upstream(one): one.num_open for one in upstreams.each}
        moved = self.num_moved + upstreams.num_moved
        return msgspec.structs.replace(self, num_moved=moved, open_upstream=open_upstream)


def add(each: Iterable[Counters]) -> Counters:
    parts = list(each)
    return Counters(
        requests=_sum(one.requests for one in parts),
        errors=_sum(one.errors for one in parts),
        num_open=sum(one.num_open for one in parts),
        num_hang_ups=sum(one.num_hang_ups for one in parts),
        num_moved=sum(one.num_moved for one in parts),
        open_upstream=_sum(one.open_upstream for one in parts),
    )


def _sum(each: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in each:
        total.update(one)
    return dict(total)


def _of_upstream(upstream: Upstream) -> str:
    return f'upstream="{upstream.address.grpc}"'


def _family(name: str, kind: str, meaning: str, samples: Mapping[str, int]) -> str:
    name = f"tidewheel_gateway_{name}"
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples.items()]
    return "\n".join([*lines, ""])


def merge(texts: Mapping[str, str]) -> str:
    """Join the figures of several servers: a family once, each sample with the label `upstream`."""
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
