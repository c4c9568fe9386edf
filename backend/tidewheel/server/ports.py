from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass

from tidewheel.server.errors import ServeError

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - how to reach a server that listens everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def choose(host: str, wanted: Ports) -> Ports:
    """Replace every 0 in `wanted`. Raise `ServeError` naming a port in use and its option.

    All are held until the last is known, so that they differ. They are free again on return.
    """
    with contextlib.ExitStack() as held:
        http = _hold(held, host, wanted.http, "http")
        grpc = _hold(held, host, wanted.grpc, "grpc")
        metrics = _hold(held, host, wanted.metrics, "metrics")
        return Ports(http=http, grpc=grpc, metrics=metrics)


def reachable(host: str) -> str:
    """Return the address to reach a server bound to `host`."""
    return _ANY.get(host, host)


def authority(host: str, port: int) -> str:
    address = reachable(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _hold(held: contextlib.ExitStack, host: str, port: int, name: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    # Like Triton: a port with only TIME_WAIT connections is free.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((host, port))
        one.listen(1)
    except socket.gaierror:
        raise ServeError(f"--host is {host!r}: no such address") from None
    except OSError as error:
        raise ServeError(_cannot_bind(host, port, name, error)) from None
    return int(one.getsockname()[1])


def _cannot_bind(host: str, port: int, name: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: choose another with --{name}-port (0 takes a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}: not an address of this machine"
    return f"cannot listen on {host} port {port} (--{name}-port): {error.strerror}"
