"""The stub for Python 3.12 ignores PYTHONPATH; `model.py` reads it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tidewheel.server.tritonserver import package_folder, python_path

LOAD = """
import importlib.util, sys
sys.path.append(sys.argv[1])  # what Triton does for its own helper
spec = importlib.util.spec_from_file_location("model", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(sys.modules["tidewheel"].__file__, sys.flags.isolated)
"""


def test_the_package_is_found_without_the_environment_of_python(tmp_path: Path) -> None:
    (tmp_path / "triton_python_backend_utils.py").write_text("def __getattr__(name): return object\n")
    folder = package_folder("tidewheel")
    paths = [*python_path(), sysconfig.get_path("purelib")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LOAD, str(tmp_path), str(folder / "model.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(folder / "__init__.py"), "1"], done.stderr
