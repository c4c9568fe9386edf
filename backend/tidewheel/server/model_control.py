"""Load and unload of models in a running server, by a private socket or over Triton's API."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from tidewheel.server import ServeError, repository
from tidewheel_process.child import wait_until

MAX_LINE = 1 << 16  # bytes of a command
READ_S = 60.0  # for a command to arrive
_TIMEOUT_S = 3600.0  # a load has limits of its own

Action = Literal["load", "unload", "reload"]


class Command(msgspec.Struct):
    """Command on the control socket: a line of JSON."""

    do: Action
    model: str


class _Answer(msgspec.Struct):
    error: str = ""


@dataclass(slots=True)
class _PendingLoad:
    model: str
    undo: Callable[[], None]  # so that Triton does not try again
    failure: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass(kw_only=True)
class ModelControl:
    """Loader and unloader of models, by changing the private repository that Triton polls."""

    source: Path  # the operator's repository
    target: Path  # the private one
    check: Callable[[], None]  # raises `ServeError` while nothing can be loaded
    serves: Callable[[str], bool]  # asks Triton
    forget: Callable[[str], None]  # takes an unloaded model

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: _PendingLoad | None = None

    def handle(self, command: Command) -> None:
        """Execute a command. Raise `ServeError`. Not thread-safe."""
        self.check()
        actions = {"load": self._load, "unload": self._unload, "reload": self._reload}
        try:
            actions[command.do](command.model)
        except OSError as error:
            raise ServeError(f"{error.filename}: {error.strerror}") from None

    def note_load(self, model: str, failure: str) -> None:
        """Report the end of a load to its waiting command; `failure` is empty if the model serves. Thread-safe."""
        with self._lock:
            pending = self._pending
            if pending is None or pending.model != model:
                return
            self._pending = None
        if failure:
            pending.undo()
        pending.failure = failure
        pending.ended.set()

    def note_restart(self, reason: str) -> None:
        """Fail and undo the pending load, because the server restarts without its model."""
        pending = self._pending
        if pending is not None:
            self.note_load(pending.model, reason)

    def _load(self, model: str) -> None:
        if model not in (names := repository.folder_names(self.source)):
            raise ServeError(f"there is no model {model!r}; {self.source} has {', '.join(names) or 'none'}")
        if model in repository.folder_names(self.target):
            raise ServeError(f"model {model!r} is loaded: tidewheel reload loads it again")
        self._wait(
            model,
            lambda: repository.add_entry(self.source, model, self.target),
            lambda: repository.remove_entry(self.target, model),
        )

    def _reload(self, model: str) -> None:
        entry = self._loaded(model)
        repository.refresh_entry(entry)
        self._wait(model, lambda: repository.load_again(entry), lambda: repository.load_again(entry, undo=True))

    def _unload(self, model: str) -> None:
        self._loaded(model)
        repository.remove_entry(self.target, model)
        self.forget(model)
        wait_until(lambda: not self.serves(model), _TIMEOUT_S)

    def _loaded(self, model: str) -> Path:
        if model not in (names := repository.folder_names(self.target)):
            raise ServeError(f"model {model!r} is not loaded; loaded models: {', '.join(names) or 'none'}")
        return self.target / model

    def _wait(self, model: str, load: Callable[[], None], undo: Callable[[], None]) -> None:
        pending = self._pending = _PendingLoad(model, undo)
        try:
            load()
            pending.ended.wait()
        finally:
            self._pending = None
        if pending.failure:
            raise ServeError(f"model {model!r} cannot be loaded: {pending.failure}")


class ControlSocket(socketserver.ThreadingUnixStreamServer):
    """Server of commands on a Unix socket, one at a time.

    A client gets the bare message of a `ServeError`, and class and first line of any other exception.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, handle: Callable[[Command], None]) -> None:
        self._handle = handle
        self._turn = threading.Lock()
        super().__init__(str(path), _Connection)
        path.chmod(0o600)

    def do(self, line: bytes) -> str:
        """Execute a line from the socket. Return the error; empty: done."""
        try:
            with self._turn:
                self._handle(msgspec.json.decode(line, type=Command))
        except (ServeError, msgspec.DecodeError) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        return ""

    def __enter__(self) -> ControlSocket:
        threading.Thread(target=self.serve_forever, args=(0.1,), name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Connection(socketserver.StreamRequestHandler):
    server: ControlSocket
    timeout = READ_S

    def handle(self) -> None:
        answer = _Answer(self.server.do(self.rfile.readline(MAX_LINE)))
        self.wfile.write(msgspec.json.encode(answer) + b"\n")


def ask_server(control: Path, action: Action, model: str) -> None:
    """Have the server at a control socket load, unload or reload a model. Raise `ServeError`."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(control))
            connection.sendall(msgspec.json.encode(Command(action, model)) + b"\n")
            with connection.makefile("rb") as lines:
                answer = msgspec.json.decode(lines.readline(MAX_LINE), type=_Answer)
    except (OSError, msgspec.DecodeError) as error:
        raise ServeError(f"{control} does not answer: {error}") from None
    if answer.error:
        raise ServeError(answer.error)


def reload(authority: str, model: str) -> None:
    """Unload and load a model over Triton's API, so that it gets new front ends. Raise OSError."""
    # Over HTTP, Triton would hold up every connection that shares the thread of the call, and lose their answers.
    import grpc  # slow, and seldom needed
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(authority, options=[("grpc.enable_http_proxy", 0)]) as channel:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            triton.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=model), timeout=_TIMEOUT_S)
            triton.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=model), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise OSError(f"{authority} answered {error.code().name}: {error.details()}") from None
