"""Ports of a server, and a client of Triton's HTTP endpoint."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tidewheel.server import ServeError

ANSWER_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - how to reach a server that listens everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    host: str = "127.0.0.1"
    http: int = 0  # 0: a free port
    grpc: int = 0
    metrics: int = 0
    health: int = 0
    openai: int | None = None  # None: no gateway

    def chosen(self) -> Endpoints:
        """Replace every port 0 with a free one; all differ. Raise `ServeError` for a port in use."""
        with contextlib.ExitStack() as held:
            ports = {name: port for name, port in asdict(self).items() if name != "host" and port is not None}
            chosen: dict[str, Any] = {name: self._hold(held, port, name) for name, port in ports.items()}
            return replace(self, **chosen)

    def authority(self, port: int) -> str:
        address = _ANY.get(self.host, self.host)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def triton(self) -> TritonHttp:
        return TritonHttp(self.authority(self.http))

    @property
    def metrics_url(self) -> str:
        return f"http://{self.authority(self.metrics)}/metrics"

    @property
    def ready_url(self) -> str:
        return f"http://{self.authority(self.health)}/ready"

    def connect(self) -> socket.socket:
        """Return a connection to the HTTP endpoint, unconnected if it does not answer."""
        address = _ANY.get(self.host, self.host)
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        connection.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):
            connection.connect((address, self.http))
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: tidewheel\r\n\r\n")
            connection.recv(1)  # so that Triton counts it
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


class DeployedModel(NamedTuple):
    name: str
    backend: str
    decoupled: bool
    engine_of: str  # model whose engine it shares, or empty


class TritonHttp:
    """Client with a connection for each call."""

    def __init__(self, authority: str) -> None:
        self._authority = authority

    def is_ready(self) -> bool:
        return self._holds("/v2/health/ready")

    def is_live(self) -> bool:
        return self._holds("/v2/health/live")

    def serves(self, model: str) -> bool:
        return self._holds(f"/v2/models/{quote(model, safe='')}/ready")

    def models(self) -> list[DeployedModel]:
        """Return the ready models. Raise OSError without an answer."""
        index = self._json("POST", "/v2/repository/index")
        names = sorted({entry["name"] for entry in index if entry.get("state") == "READY"})
        return [self._model(name) for name in names]

    def _model(self, name: str) -> DeployedModel:
        config = self._json("GET", f"/v2/models/{quote(name, safe='')}/config")
        parameters = config.get("parameters", {})
        return DeployedModel(
            name=name,
            backend=config.get("backend", ""),
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            engine_of=parameters.get("engine_of", {}).get("string_value", ""),
        )

    def _holds(self, path: str) -> bool:
        try:
            return self._call("GET", path)[0] == 200
        except OSError:
            return False

    def _json(self, method: str, path: str) -> Any:
        status, body = self._call(method, path)
        if status != 200:
            raise OSError(f"{path} answered {status}")
        return json.loads(body)

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._authority, timeout=ANSWER_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()


def check_keys(host: str, api_keys: Path | None) -> None:
    """Raise `ServeError` if other machines could use the gateway without a key."""
    if api_keys is None and not is_loopback(host):
        raise ServeError(
            f"--host is {host!r}, and there is no --api-keys: all that reach the gateway could use the models; "
            "give a file of keys, or leave the host at 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
