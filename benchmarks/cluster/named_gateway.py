"""`tidewheel gateway` with a name service: the name `replicas` has the addresses that a file lists, line by line.

    python benchmarks named_gateway FILE gateway --url dns:replicas:8001 …

It stands for a headless service, which needs a DNS server.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from tidewheel.cli.main import main

NAME = "replicas"
_getaddrinfo = socket.getaddrinfo


def name_service(file: Path) -> Any:
    """Return a `getaddrinfo` that reads the file for `NAME`."""

    def find(host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if host != NAME:
            return _getaddrinfo(host, port, *args, **kwargs)
        hosts = file.read_text().split()
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, f"{file} is empty")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (one, port)) for one in hosts]

    return find


if __name__ == "__main__":
    socket.getaddrinfo = name_service(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
