"""The gateway's own figures, beside those of its servers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tidewheel.gateway.upstreams import Upstreams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Counters:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.num_open = 0
        self.num_hang_ups = 0  # requests whose client went away

    def render(self, upstreams: Upstreams) -> str:
        requests = {f'path="{path}",status="{status}"': count for (path, status), count in self.requests.items()}
        ready = {f'upstream="{one.address.grpc}"': int(not one.not_ready) for one in upstreams.each}
        open_there = {f'upstream="{one.address.grpc}"': one.num_open for one in upstreams.each}
        families = (
            ("requests_total", "counter", "answered requests", requests),
            ("open_requests", "gauge", "requests without a whole answer", {"": self.num_open}),
            ("hang_ups_total", "counter", "requests whose client went away", {"": self.num_hang_ups}),
            ("moved_total", "counter", "requests that went on to another server", {"": upstreams.num_moved}),
            ("upstream_ready", "gauge", "1 for a server that takes requests", ready),
            ("upstream_open_requests", "gauge", "requests that a server works on", open_there),
        )
        return "".join(_family(*family) for family in families)


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
