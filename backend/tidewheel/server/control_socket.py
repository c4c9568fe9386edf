"""Commands to the process of a server or a cluster: a line of JSON each way, on a socket in its private folder."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE = 1 << 16
ASK_S = 60.0

Handle = Callable[[dict[str, Any]], dict[str, Any]]


class ControlSocket(socketserver.ThreadingUnixStreamServer):
    """Server for commands on a Unix socket, while its `with` block lasts. Runs `handle` for one command at a time.

    A client gets the bare message of an `error`, and class and first line of any other exception.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, handle: Handle, error: type[Exception]) -> None:
        self._handle = handle
        self._error = error
        self._turn = threading.Lock()
        super().__init__(str(path), _Command)
        path.chmod(0o600)

    def answer(self, line: bytes) -> bytes:
        try:
            with self._turn:
                told = self._handle(msgspec.json.decode(line, type=dict[str, Any]))
        except (self._error, msgspec.DecodeError) as error:
            told = {"error": str(error)}
        except Exception as error:  # whatever it is, the asker has to hear of it
            told = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"}
        return msgspec.json.encode(told)

    def __enter__(self) -> ControlSocket:
        threading.Thread(target=self.serve_forever, args=(0.1,), name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Command(socketserver.StreamRequestHandler):
    server: ControlSocket
    timeout = ASK_S

    def handle(self) -> None:
        self.wfile.write(self.server.answer(self.rfile.readline(MAX_LINE)) + b"\n")


def ask(path: Path, command: dict[str, Any], error: type[Exception], limit_s: float | None = ASK_S) -> dict[str, Any]:
    """Send a command to a `ControlSocket` and return its answer.

    Raise `error` if the answer is an error, or none comes within `limit_s` seconds (None: wait without limit).
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(limit_s)
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(command) + b"\n")
            with connection.makefile("rb") as answer:
                told = msgspec.json.decode(answer.readline(MAX_LINE), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as failure:
        raise error(f"{path} does not answer: {failure}") from None
    if "error" in told:
        raise error(str(told["error"]))
    return told
