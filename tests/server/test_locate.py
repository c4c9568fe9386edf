"""Which tritonserver is found, on trees made for the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidewheel.server import ServeError
from tidewheel.server.tritonserver import STUB_NAME, locate

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NOWHERE = Path("/nonexistent/tritonserver")


def program(path: Path, content: bytes = b"#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def installation(root: Path, python: str = PYTHON) -> Path:
    """As NVIDIA's container lays it out; the path of the server."""
    program(root / "backends" / "python" / "libtriton_python.so")
    program(root / "backends" / "python" / STUB_NAME, b"\x7fELF\0libc.so.6\0libpython%s.so.1.0\0" % python.encode())
    (root / "lib").mkdir()
    return program(root / "bin" / "tritonserver")


def wheel(root: Path, pythons: tuple[str, ...] = (PYTHON,)) -> Path:
    """As nvidia-pytriton lays it out; the folder of the package."""
    package = root / "pytriton"
    program(package / "__init__.py", b"raise ImportError\n")  # it is looked for, not imported
    program(package / "tritonserver" / "bin" / "tritonserver")
    program(package / "tritonserver" / "backends" / "python" / "libtriton_python.so")
    for version in pythons:
        program(package / "tritonserver" / "python_backend_stubs" / version / STUB_NAME)
    (root / "nvidia_pytriton.libs").mkdir()
    return package


@pytest.fixture
def no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pytriton on the path holds no server."""
    program(tmp_path / "without a server" / "pytriton" / "__init__.py", b"")
    monkeypatch.syspath_prepend(tmp_path / "without a server")


def test_the_named_one_comes_first(tmp_path: Path) -> None:
    named, variable, container = (installation(tmp_path / name) for name in ("named", "variable", "container"))
    environment = {"TRITONSERVER": str(variable), "PATH": str(container.parent)}
    assert locate(str(named), environment, container).binary == named
    assert locate(None, environment, container).binary == variable
    assert locate(None, {"PATH": str(variable.parent)}, container).binary == container
    assert locate(None, {"PATH": str(variable.parent)}, NOWHERE).binary == variable


def test_installation(tmp_path: Path) -> None:
    binary = installation(tmp_path / "opt")
    found = locate(str(binary), {}, NOWHERE)
    assert found.backends == tmp_path / "opt" / "backends"
    assert found.stub == found.backends / "python" / STUB_NAME
    assert tmp_path / "opt" / "lib" in found.libraries
    assert "--tritonserver" in found.origin


def test_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = wheel(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = locate(None, {"PATH": ""}, NOWHERE)
    assert found.binary == package / "tritonserver" / "bin" / "tritonserver"
    assert found.stub == package / "tritonserver" / "python_backend_stubs" / PYTHON / STUB_NAME
    assert found.libraries[0] == tmp_path / "nvidia_pytriton.libs"


def test_the_wheel_by_name_is_laid_out_as_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = wheel(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    named = package / "tritonserver" / "bin" / "tritonserver"
    assert locate(str(named), {}, NOWHERE).stub.parent.name == PYTHON
    assert locate(None, {"PATH": str(named.parent)}, NOWHERE).libraries[0] == tmp_path / "nvidia_pytriton.libs"


def test_wheel_without_a_stub_for_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, pythons=("3.7", "3.8"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ServeError, match=rf"{PYTHON}, only for 3\.7, 3\.8"):
        locate(None, {"PATH": ""}, NOWHERE)


@pytest.mark.usefixtures("no_wheel")
def test_none_at_all() -> None:
    with pytest.raises(ServeError, match="pip install"):
        locate(None, {"PATH": ""}, NOWHERE)


@pytest.mark.usefixtures("no_wheel")
@pytest.mark.parametrize("where", ["--tritonserver", "TRITONSERVER"])
def test_a_named_one_that_is_not_there(where: str) -> None:
    environment = {"TRITONSERVER": "/nonexistent"} if where == "TRITONSERVER" else {}
    with pytest.raises(ServeError, match=f"{where} is '/nonexistent', no such program"):
        locate(None if environment else "/nonexistent", environment, NOWHERE)


@pytest.mark.usefixtures("no_wheel")
def test_a_stub_for_another_python(tmp_path: Path) -> None:
    binary = installation(tmp_path / "opt", python="3.7")
    with pytest.raises(ServeError, match=rf"built for Python 3\.7, this is Python {PYTHON}"):
        locate(str(binary), {}, NOWHERE)


@pytest.mark.usefixtures("no_wheel")
def test_a_server_without_the_python_backend(tmp_path: Path) -> None:
    binary = program(tmp_path / "bin" / "tritonserver")
    with pytest.raises(ServeError, match=r"libtriton_python\.so is missing"):
        locate(str(binary), {}, NOWHERE)
