"""Load and unload models of a running server, for its own user: by a private socket, or over Triton's API."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tidewheel.server import ServeError, processes, repository
from tidewheel.server.control_socket import ask

_TIMEOUT_S = 3600.0  # a load has limits of its own

Action = Literal["load", "unload", "reload"]


@dataclass(slots=True)
class _PendingLoad:
    model: str
    undo: Callable[[], None]  # so that Triton does not try again
    failure: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


class ModelControl:
    """Loader and unloader of models: changes the private repository that Triton polls and waits for the result."""

    def __init__(
        self, source: Path, target: Path, *, check: Callable[[], None], serves: Callable[[str], bool],
        forget: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Take the operator's repository and the private one.

        `check` raises `ServeError` while nothing can be loaded, `serves` asks whether Triton takes requests of a
        model, and `forget` is called with an unloaded one.
        """
        self._source = source
        self._target = target
        self._check = check
        self._serves = serves
        self._forget = forget
        self._lock = threading.Lock()
        self._pending: _PendingLoad | None = None

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Load, unload or reload the model that a command of `ask_server` names, and wait until it is done.

        Return an empty answer. Raise `ServeError` if that fails. Not for several threads at once.
        """
        self._check()
        actions = {"load": self._load, "unload": self._unload, "reload": self._reload}
        try:
            actions[command["do"]](str(command["model"]))
        except OSError as error:
            raise ServeError(f"{error.filename}: {error.strerror}") from None
        return {}

    def note_load(self, model: str, failure: str) -> None:
        """End the wait for a load of `model`; an empty `failure` means that it serves. Thread-safe."""
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
        """Fail the pending load with `reason` and undo it, so that the server restarts without that model."""
        pending = self._pending
        if pending is not None:
            self.note_load(pending.model, reason)

    def _load(self, model: str) -> None:
        if model not in (names := repository.folder_names(self._source)):
            raise ServeError(f"there is no model {model!r}; {self._source} has {', '.join(names) or 'none'}")
        if model in repository.folder_names(self._target):
            raise ServeError(f"model {model!r} is loaded: tidewheel reload loads it again")
        self._wait(
            model,
            functools.partial(repository.add_entry, self._source, model, self._target),
            functools.partial(repository.remove_entry, self._target, model),
        )

    def _reload(self, model: str) -> None:
        entry = self._loaded(model)
        repository.refresh_entry(entry)
        self._wait(
            model,
            functools.partial(repository.load_again, entry),
            functools.partial(repository.give_up_loading, entry),
        )

    def _unload(self, model: str) -> None:
        self._loaded(model)
        repository.remove_entry(self._target, model)
        self._forget(model)
        processes.wait_until(lambda: not self._serves(model), _TIMEOUT_S)

    def _loaded(self, model: str) -> Path:
        if model not in (names := repository.folder_names(self._target)):
            raise ServeError(f"model {model!r} is not loaded; loaded models: {', '.join(names) or 'none'}")
        return self._target / model

    def _wait(self, model: str, load: Callable[[], None], undo: Callable[[], None]) -> None:
        pending = self._pending = _PendingLoad(model, undo)
        try:
            load()
            pending.ended.wait()
        finally:
            self._pending = None
        if pending.failure:
            raise ServeError(f"model {model!r} cannot be loaded: {pending.failure}")


def ask_server(control: Path, action: Action, model: str) -> None:
    """Ask the server at the socket `control` to load, unload or reload a model. Raise `ServeError` on failure."""
    ask(control, {"do": action, "model": model}, ServeError, None)


def reload(authority: str, model: str) -> None:
    """Unload and load a model over Triton's API, which gives it new front ends. Raise OSError if that fails.

    Over HTTP, Triton would hold up every connection that shares the thread of the call, and lose their answers.
    """
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
