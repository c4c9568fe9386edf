import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tidewheel.server import LoadError, ServeError, repository
from tidewheel.server.supervisor import Supervisor
from tidewheel_process.child import wait_until

MAX_BYTES = 1 << 16  # of a command
READ_S = 5.0
_RETRY_S = 0.1
_TIMEOUT_S = 3600.0  # a load has limits of its own

Action = Literal["load", "unload", "reload"]


class Command(msgspec.Struct):
    do: Action
    model: str


class _PendingLoad(NamedTuple):
    model: str
    undo: Callable[[], None]  # so that Triton does not try again
    end: Future[None]


@dataclass
class ModelControl:
    """Loader and unloader of models, by changing the private repository that Triton polls."""

    source: Path  # the operator's repository
    target: Path  # the private one
    supervisor: Supervisor
    serves: Callable[[str], bool]  # asks Triton

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: _PendingLoad | None = None

    def handle(self, command: Command) -> None:
        """Execute a command. Raise `ServeError`. Not thread-safe."""
        if (state := self.supervisor.readiness.state) in ("starting", "draining", "stopped"):
            raise ServeError(f"the server is {state}: nothing can be loaded until it is ready")
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
            pending.end.set_exception(LoadError(model, failure))
        else:
            pending.end.set_result(None)

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
        self.supervisor.reloads.cancel(model)
        wait_until(lambda: not self.serves(model), _TIMEOUT_S)

    def _loaded(self, model: str) -> Path:
        if model not in (names := repository.folder_names(self.target)):
            raise ServeError(f"model {model!r} is not loaded; loaded models: {', '.join(names) or 'none'}")
        return self.target / model

    def _wait(self, model: str, load: Callable[[], None], undo: Callable[[], None]) -> None:
        pending = self._pending = _PendingLoad(model, undo, Future())
        try:
            load()
            pending.end.result()
        finally:
            self._pending = None


class ControlSocket:
    """Server of commands on a Unix socket, one at a time.

    A client gets the bare message of a `ServeError`, and class and first line of any other exception.
    """

    def __init__(self, path: Path, handle: Callable[[Command], None]) -> None:
        self._handle = handle
        self._listener = Listener(str(path), "AF_UNIX")
        self._closed = threading.Event()
        path.chmod(0o600)

    def __enter__(self) -> "ControlSocket":
        threading.Thread(target=self._run, name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._listener.accept() as connection:
                    if connection.poll(READ_S):
                        os.set_blocking(connection.fileno(), False)
                        command = connection.recv_bytes(MAX_BYTES)
                        os.set_blocking(connection.fileno(), True)
                        connection.send_bytes(self._do(command).encode(errors="replace"))
            except (OSError, EOFError):  # of a client that has gone, or without a free descriptor
                self._closed.wait(_RETRY_S)

    def _do(self, command: bytes) -> str:
        """Execute a command. Return its error message, empty if it was done."""
        try:
            self._handle(msgspec.json.decode(command, type=Command))
        except (ServeError, msgspec.DecodeError) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        return ""


def ask_server(control: Path, action: Action, model: str) -> None:
    """Have the server at a control socket load, unload or reload a model. Raise `ServeError`."""
    try:
        with Client(str(control), "AF_UNIX") as connection:
            connection.send_bytes(msgspec.json.encode(Command(action, model)))
            answer = connection.recv_bytes().decode()
    except (OSError, EOFError) as error:
        raise ServeError(f"{control} does not answer: {error}") from None
    if answer:
        raise ServeError(answer)


def reload(authority: str, model: str) -> None:
    """Unload and load a model over Triton's API, so that it gets new front ends. Raise OSError."""
    # Over HTTP, Triton would block connections that share the call's thread, and lose their answers.
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
