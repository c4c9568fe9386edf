"""The backend directory: links to what is installed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import tidewheel
from tidewheel.server import ServeError
from tidewheel.server.tritonserver import STUB_NAME, TritonInstall, assemble, package_folder, python_path


@pytest.fixture
def install(tmp_path: Path) -> TritonInstall:
    backends = tmp_path / "backends"
    for path in ("python/libtriton_python.so", f"python/{STUB_NAME}", "python/utils.py", "onnxruntime/lib.so"):
        (backends / path).parent.mkdir(parents=True, exist_ok=True)
        (backends / path).write_text(path)
    (backends / "tidewheel").mkdir()  # an older one, baked into an image
    stub = tmp_path / "3.99" / STUB_NAME
    stub.parent.mkdir()
    stub.write_text("the right stub")
    return TritonInstall(binary=tmp_path / "t", backends=backends, stub=stub, libraries=(), origin="test")


def test_assemble(install: TritonInstall, tmp_path: Path) -> None:
    target = assemble(install, tmp_path / "work" / "backends")
    assert sorted(path.name for path in target.iterdir()) == ["onnxruntime", "python", "tidewheel"]
    assert (target / "python" / STUB_NAME).read_text() == "the right stub"
    assert (target / "python" / "utils.py").read_text() == "python/utils.py"
    assert (target / "onnxruntime" / "lib.so").exists()
    assert (target / "tidewheel").resolve() == Path(tidewheel.__path__[0]).resolve()


def test_python_path_reaches_the_packages() -> None:
    path = python_path()
    assert len(path) == len(set(path))
    for package in ("tidewheel", "tidewheel_kernels", "tidewheel_client", "tidewheel_process"):
        assert any((Path(root) / package).is_dir() for root in path)


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ServeError, match="no_such_package is not installed"):
        package_folder("no_such_package")
