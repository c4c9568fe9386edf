"""A collector of OpenTelemetry on a free port, which keeps what it is sent."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.triton.serving import wait_for


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []  # opentelemetry.proto.trace.v1.Span
        self.json_spans: list[dict[str, Any]] = []  # those of Triton, which sends JSON
        self.paths: set[str] = set()

    def take_json(self, body: bytes) -> None:
        for of_resource in json.loads(body)["resourceSpans"]:
            self.json_spans += [span for scope in of_resource["scopeSpans"] for span in scope["spans"]]

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.paths.add(path)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(of_resource.resource))
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]

    def roots(self, name: str = "text_completion demo") -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]

    def wait_roots(self, count: int, limit_s: float = 20.0, name: str = "text_completion demo") -> list[Any]:
        wait_for(lambda: len(self.roots(name)) >= count, limit_s, f"{count} traces")
        return self.roots(name)

    def stages(self, root: Any) -> dict[str, Any]:
        """Return the spans below a request's, by name."""
        return {span.name: span for span in self.spans if span.parent_span_id == root.span_id}


def attributes(of: Any) -> dict[str, Any]:
    found = {}
    for pair in of.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            if self.headers["Content-Type"] == "application/json":
                collector.take_json(body)
            else:
                collector.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
