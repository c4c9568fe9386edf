"""Loads and unloads: by the private socket, with a Triton that says what it would do, and over Triton's API."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tidewheel.adapter.repository_entry import ORIGIN
from tidewheel.health_endpoint import Readiness, State
from tidewheel.server import ServeError, repository
from tidewheel.server.model_control import MAX_BYTES, Action, Command, ControlSocket, ModelControl, ask_server, reload
from tidewheel.server.repository import folder_names, mirror


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails = False

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.calls.append(("unload", request.model_name))
        return pb.RepositoryModelUnloadResponse()

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        self.calls.append(("load", request.model_name))
        if self.fails:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such folder")
        return pb.RepositoryModelLoadResponse()


@pytest.fixture
def served() -> Iterator[tuple[Triton, str]]:
    triton, server = Triton(), grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield triton, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_reload(served: tuple[Triton, str]) -> None:
    triton, authority = served
    reload(authority, "b c")
    assert triton.calls == [("unload", "b c"), ("load", "b c")]
    triton.fails = True
    with pytest.raises(OSError, match="INVALID_ARGUMENT: no such folder"):
        reload(authority, "b c")


def test_reload_without_a_server() -> None:
    with pytest.raises(OSError, match="UNAVAILABLE"):
        reload("127.0.0.1:9", "a")


class PollingTriton:
    """A Triton that polls at once, as soon as the repository has changed."""

    def __init__(self, folder: Path) -> None:
        self.failure = ""
        self.forgotten: list[str] = []
        self.reloads = SimpleNamespace(cancel=self.forgotten.append)
        self.state: State = "ready"
        source = folder / "source"
        for name in ("a", "b"):
            (source / name / "1").mkdir(parents=True)
            (source / name / "config.pbtxt").touch()
        self.served = mirror(source, ["a"], folder / "models")
        self.control = ModelControl(source, self.served, self, lambda _: False)  # type: ignore[arg-type]

    @property
    def readiness(self) -> Readiness:
        return Readiness(self.state)

    def mtime(self, model: str) -> float:
        return (self.served / model / ORIGIN).stat().st_mtime


@pytest.fixture
def polling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PollingTriton, Path]]:
    triton = PollingTriton(tmp_path)

    def answered(name: str) -> None:
        change = getattr(repository, name)

        def changed(*arguments: Any, **options: Any) -> None:
            change(*arguments, **options)
            triton.control.note_load("another", "not this one")
            triton.control.note_load(arguments[1] if name == "add_entry" else arguments[0].name, triton.failure)

        monkeypatch.setattr(repository, name, changed)

    answered("add_entry")
    answered("load_again")
    with ControlSocket(tmp_path / "c", triton.control.handle):
        yield triton, tmp_path / "c"


def test_load_and_unload(polling: tuple[PollingTriton, Path]) -> None:
    triton, control = polling
    ask_server(control, "load", "b")
    assert folder_names(triton.served) == ["a", "b"]
    assert (triton.served / "b" / "config.pbtxt").is_symlink()
    ask_server(control, "unload", "a")
    assert folder_names(triton.served) == ["b"]
    assert triton.forgotten == ["a"]


def test_a_load_that_fails_leaves_nothing_to_try_again(polling: tuple[PollingTriton, Path]) -> None:
    triton, control = polling
    triton.failure = "no weights"
    with pytest.raises(ServeError, match="model 'b' cannot be loaded: no weights"):
        ask_server(control, "load", "b")
    assert folder_names(triton.served) == ["a"]
    before = triton.mtime("a")
    with pytest.raises(ServeError, match="model 'a' cannot be loaded: no weights"):
        ask_server(control, "reload", "a")
    assert triton.mtime("a") == before


def test_a_reload_sees_files_that_are_new_and_none_that_are_gone(
    polling: tuple[PollingTriton, Path], tmp_path: Path
) -> None:
    triton, control = polling
    (tmp_path / "source" / "a" / "2").mkdir()
    (tmp_path / "source" / "a" / "1").rmdir()
    before = triton.mtime("a")
    ask_server(control, "reload", "a")
    assert sorted(path.name for path in (triton.served / "a").iterdir()) == ["2", "config.pbtxt", ORIGIN]
    assert triton.mtime("a") > before


@pytest.mark.parametrize(
    ("action", "model", "words"),
    [
        ("load", "a", "is loaded: tidewheel reload"),
        ("load", "../source/b", r"there is no model '../source/b'; .* has a, b"),
        ("load", ".", "there is no model"),
        ("unload", "b", "'b' is not loaded; loaded models: a"),
        ("reload", "..", "'..' is not loaded"),
    ],
)
def test_refused_commands(polling: tuple[PollingTriton, Path], action: Action, model: str, words: str) -> None:
    triton, control = polling
    with pytest.raises(ServeError, match=words):
        ask_server(control, action, model)
    assert folder_names(triton.served) == ["a"]


def test_nothing_is_loaded_while_the_server_cannot(polling: tuple[PollingTriton, Path]) -> None:
    triton, control = polling
    triton.state = "starting"
    with pytest.raises(ServeError, match="the server is starting"):
        ask_server(control, "load", "b")


def test_a_restart_takes_back_what_was_being_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a model that kills the server would do so for ever."""
    triton = PollingTriton(tmp_path)
    add_entry = repository.add_entry

    def killed(*arguments: Any) -> None:
        add_entry(*arguments)
        triton.control.note_restart("tritonserver died")

    monkeypatch.setattr(repository, "add_entry", killed)
    with pytest.raises(ServeError, match="cannot be loaded: tritonserver died"):
        triton.control.handle(Command("load", "b"))
    assert folder_names(triton.served) == ["a"]
    triton.control.note_restart("again")


@pytest.mark.timeout(60)
def test_half_a_command_holds_up_no_other(tmp_path: Path) -> None:
    done: list[Command] = []
    with ControlSocket(tmp_path / "c", done.append), socket.socket(socket.AF_UNIX) as half:
        half.connect(str(tmp_path / "c"))
        half.send(b"\0")
        ask_server(tmp_path / "c", "load", "this")
    assert done == [Command("load", "this")]


def test_commands_are_answered_in_turn(tmp_path: Path) -> None:
    done: list[Command] = []

    def handle(command: Command) -> None:
        match command.model:
            case "fail":
                raise ServeError("it cannot")
            case "odd":
                raise ServeError("there is a folder \udcff")  # its name is no UTF-8
            case "crash":
                raise ZeroDivisionError
        done.append(command)

    path = tmp_path / "c"
    with ControlSocket(path, handle):
        assert path.stat().st_mode & 0o777 == 0o600
        ask_server(path, "load", "this")
        assert done == [Command("load", "this")]
        for action, model, error in (
            ("load", "fail", "^it cannot$"), ("load", "odd", r"^there is a folder \?$"),
            ("load", "crash", "^ZeroDivisionError: no reason given$"),
            ("load", "x" * MAX_BYTES, ""), ("fly", "this", "fly"),
        ):  # fmt: skip
            with pytest.raises(ServeError, match=error):
                ask_server(path, action, model)  # type: ignore[arg-type]
    with pytest.raises(ServeError, match="does not answer"):
        ask_server(path, "load", "this")
