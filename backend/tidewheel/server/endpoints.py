import contextlib
import errno
import http.client  # httpx2 takes four times as long to import
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

    def chosen(self) -> "Endpoints":
        """Return the ports, each 0 replaced by a distinct free one. Raise `ServeError` for a port in use."""
        with contextlib.ExitStack() as held:
            ports = {name: port for name, port in asdict(self).items() if name != "host" and port is not None}
            chosen: dict[str, Any] = {
                name: held.enter_context(bound(self.host, port, f"--{name}-port")).getsockname()[1]
                for name, port in ports.items()
            }
            return replace(self, **chosen)

    def authority(self, port: int) -> str:
        address = _ANY.get(self.host, self.host)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def authorities(self) -> dict[str, Any]:
        """Addresses `host:port` by name: grpc, metrics, health and http."""
        return {name: self.authority(getattr(self, name)) for name in ("grpc", "metrics", "health", "http")}

    @property
    def triton(self) -> "TritonHttp":
        return TritonHttp(self.authority(self.http))

    @property
    def metrics_url(self) -> str:
        return f"http://{self.authority(self.metrics)}/metrics"

    @property
    def ready_url(self) -> str:
        return f"http://{self.authority(self.health)}/ready"


def bound(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens on `port` (0: a free one). Raise `ServeError`, which names `option`."""
    with contextlib.ExitStack() as failed:
        try:
            one = failed.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            # Like Triton: a port with only TIME_WAIT connections is free.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
            one.listen(1)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                reason = f"--host is {host!r}: no such address"
            elif error.errno == errno.EADDRINUSE:
                reason = f"port {port} of {host} is in use: choose another with {option} (0 takes a free one)"
            elif error.errno == errno.EADDRNOTAVAIL:
                reason = f"--host is {host!r}: not an address of this machine"
            else:
                reason = f"cannot listen on {host} port {port} ({option}): {error.strerror}"
            raise ServeError(reason) from None
        failed.pop_all()
    return one


def free_port(host: str, port: int, option: str) -> int:
    """Return the port, or a free one for 0. Raise `ServeError`."""
    with bound(host, port, option) as one:
        return int(one.getsockname()[1])


class DeployedModel(NamedTuple):
    name: str
    backend: str
    decoupled: bool
    engine_of: str  # model whose engine it shares, or empty


class TritonHttp:
    """Client of Triton's HTTP endpoint, with a connection per call."""

    def __init__(self, authority: str) -> None:
        self._authority = authority

    def is_ready(self) -> bool:
        return self.holds("/v2/health/ready")

    def is_live(self) -> bool:
        return self.holds("/v2/health/live")

    def serves(self, model: str) -> bool:
        return self.holds(f"/v2/models/{quote(model, safe='')}/ready")

    def connect(self) -> http.client.HTTPConnection:
        """Return an accepted connection, unconnected if Triton does not answer."""
        connection = http.client.HTTPConnection(self._authority, timeout=ANSWER_S)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
        return connection

    def models(self) -> list[DeployedModel]:
        """Return the ready models. Raise OSError if Triton does not answer."""
        index = self._json("POST", "/v2/repository/index")
        models = []
        for name in sorted({one["name"] for one in index if one.get("state") == "READY"}):
            config = self._json("GET", f"/v2/models/{quote(name, safe='')}/config")
            decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
            engine_of = config.get("parameters", {}).get("engine_of", {}).get("string_value", "")
            models.append(DeployedModel(name, config.get("backend", ""), decoupled, engine_of))
        return models

    def holds(self, path: str) -> bool:
        """Return whether the server answers a GET of the path with 200."""
        with contextlib.suppress(OSError):
            return self._call("GET", path)[0] == 200
        return False

    def _json(self, method: str, path: str) -> Any:
        status, body = self._call(method, path)
        if status != 200:
            raise OSError(f"{path} answered {status}")
        return json.loads(body)

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection(self._authority, timeout=ANSWER_S)) as connection:
            try:
                connection.request(method, path)
                response = connection.getresponse()
                return response.status, response.read()
            except http.client.HTTPException as error:
                raise OSError(str(error)) from error


def check_keys(host: str, api_keys: Path | str | None) -> None:
    """Raise `ServeError` if other machines could use the gateway without a key."""
    if not api_keys and not is_loopback(host):
        raise ServeError(
            f"--host is {host!r}, and there is no --api-keys: all that reach the gateway could use the models; "
            "give a file of keys, or leave the host at 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
