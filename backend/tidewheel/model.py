"""Module that Triton imports, as `model`, for `backend: "tidewheel"`."""

import os
import sys

# The stub for Python 3.12 ignores PYTHONPATH, where `tidewheel serve` puts this package.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

from tidewheel.adapter.triton_model import TritonPythonModel as TritonPythonModel  # noqa: E402
