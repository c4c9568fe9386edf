from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from tidewheel.server import ServeError

ANSWER_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - how to reach a server that listens everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Address and ports of a server."""

    host: str = "127.0.0.1"
    http: int = 0  # 0: a free port
    grpc: int = 0
    metrics: int = 0
    health: int = 0
    openai: int | None = None  # None: no gateway

    def chosen(self) -> Endpoints:
        """Replace every port 0 with a free one; all differ. Raise `ServeError` for a port in use."""
        with contextlib.ExitStack() as held:
            http = self._hold(held, self.http, "http")
            grpc = self._hold(held, self.grpc, "grpc")
            metrics = self._hold(held, self.metrics, "metrics")
            health = self._hold(held, self.health, "health")
            openai = None if self.openai is None else self._hold(held, self.openai, "openai")
            return Endpoints(host=self.host, http=http, grpc=grpc, metrics=metrics, health=health, openai=openai)

    def authority(self, port: int) -> str:
        address = _ANY.get(self.host, self.host)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.authority(self.metrics)}/metrics"

    @property
    def ready_url(self) -> str:
        return f"http://{self.authority(self.health)}/ready"

    def connect(self) -> socket.socket:
        """Return a connection to the HTTP endpoint, unconnected if it does not answer.

        After SIGTERM, Triton unloads no model while one is open.
        """
        address = _ANY.get(self.host, self.host)
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):
            connection.connect((address, self.http))
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: tidewheel\r\n\r\n")
            connection.recv(1)  # Triton counts a connection that it has accepted
        return connection

    def _hold(self, held: contextlib.ExitStack, port: int, name: str) -> int:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # Like Triton: a port with only TIME_WAIT connections is free.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((self.host, port))
            one.listen(1)
        except socket.gaierror:
            raise ServeError(f"--host is {self.host!r}: no such address") from None
        except OSError as error:
            raise ServeError(self._cannot_bind(port, name, error)) from None
        return int(one.getsockname()[1])

    def _cannot_bind(self, port: int, name: str, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {self.host} is in use: choose another with --{name}-port (0 takes a free one)"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"--host is {self.host!r}: not an address of this machine"
        return f"cannot listen on {self.host} port {port} (--{name}-port): {error.strerror}"


def check_keys(host: str, api_keys: Path | None) -> None:
    """Raise `ServeError` if a network could ask the gateway without a key."""
    if api_keys is None and not is_loopback(host):
        raise ServeError(
            f"--host is {host!r}, and there is no --api-keys: all that reach the gateway could use the models; "
            "give a file of keys, or leave the host at 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
