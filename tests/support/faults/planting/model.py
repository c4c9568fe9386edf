"""Module that Triton imports in place of the backend's: a stub reads no `sitecustomize`."""

from __future__ import annotations

import os
import sys

sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]

from support.faults import defects  # noqa: E402

defects.plant()

from tidewheel.adapter.triton_model import TritonPythonModel as TritonPythonModel  # noqa: E402
