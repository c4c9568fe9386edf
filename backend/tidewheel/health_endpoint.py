import contextlib
import json
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

from tidewheel.metrics import SERVER_LIVE, SERVER_READY

MAX_CONNECTIONS = 16  # one more ends the oldest
MAX_REQUEST_BYTES = 8192
READ_TIMEOUT_S = 2.0

State = Literal["starting", "ready", "stopped", "hung", "reloading", "given up", "draining"]
_JSON, _TEXT = "application/json", "text/plain; version=0.0.4"


class Readiness(NamedTuple):
    state: State
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_live(self) -> bool:
        """Return whether the server may still become ready by itself."""
        return self.state != "given up"


READY = Readiness("ready")
DRAINING = Readiness("draining", "the server is shutting down")


class HealthEndpoint(socketserver.ThreadingTCPServer):
    """HTTP server of `/ready`, `/live` and `/metrics` on its own threads.

    It calls `report` and `ranks`, which must not block.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        report: Callable[[], Readiness],
        ranks: Callable[[], Mapping[str, Sequence[str]]] = dict,
    ) -> None:
        """Listen on the port; 0: a free port. `ranks`: their devices by model. Raise `OSError` for a port in use."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.report = report
        self.ranks = ranks
        self._open: deque[socket.socket] = deque()
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.1,), name="health", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > MAX_CONNECTIONS:
            with contextlib.suppress(IndexError, OSError):
                self._open.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(socketserver.StreamRequestHandler):
    server: HealthEndpoint
    timeout = READ_TIMEOUT_S

    def handle(self) -> None:
        head = self._read_head()
        status, answer = self._answer(head.split(b" ", 2))
        kind, text = (_TEXT, answer) if isinstance(answer, str) else (_JSON, json.dumps(answer))
        body = text.encode()
        self.wfile.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
            + (b"" if head.startswith(b"HEAD ") else body)
        )

    def _answer(self, words: list[bytes]) -> tuple[int, str | dict[str, object]]:
        if len(words) < 3:
            return 400, {"reason": "not a request"}
        if words[0] not in (b"GET", b"HEAD"):
            return 405, {"reason": "use GET"}
        readiness = self.server.report()
        state: dict[str, object] = {"ready": readiness.is_ready, "state": readiness.state, "reason": readiness.reason}
        match words[1].partition(b"?")[0]:
            case b"/ready":
                return 200 if readiness.is_ready else 503, {**state, "ranks": self.server.ranks()}
            case b"/live":
                return 200 if readiness.is_live else 503, state
            case b"/metrics":
                return 200, _metrics(readiness)
            case _:
                return 404, {"reason": "the paths are /ready, /live and /metrics"}

    def _read_head(self) -> bytes:
        """Return the first line of the head. Read the rest too: unread bytes reset the connection."""
        first = line = self.rfile.readline(MAX_REQUEST_BYTES)
        left = MAX_REQUEST_BYTES - len(first)
        while left > 0 and line not in (b"\r\n", b"\n", b""):
            line = self.rfile.readline(left)
            left -= len(line)
        return first if left > 0 else b""


def _metrics(readiness: Readiness) -> str:
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{metric.name} {float(value)}\n"
        for metric, value in ((SERVER_READY, readiness.is_ready), (SERVER_LIVE, readiness.is_live))
    )
