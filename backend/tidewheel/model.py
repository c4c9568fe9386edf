"""What Triton loads for a model whose `config.pbtxt` says `backend: "tidewheel"`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

# The stub for Python 3.12 runs isolated: it does not read PYTHONPATH, on which `tidewheel serve` puts this package.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

import tidewheel  # noqa: E402
from tidewheel.adapter.autocomplete import complete  # noqa: E402
from tidewheel.adapter.instance import ModelInstance  # noqa: E402
from tidewheel.errors import ConfigError, TidewheelError  # noqa: E402


class TritonPythonModel:
    """One front end: Triton makes one in a process of its own for every model instance."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        try:
            return complete(auto_complete_model_config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: Mapping[str, str]) -> None:
        # Triton imports this file as the module `model`: the log says which package it then got.
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: engine package {tidewheel.__file__}")
        try:
            self._instance = ModelInstance.open(args)
        except (ConfigError, TidewheelError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Hands the requests on; every answer goes through its request's response sender.

        Returns at once, or, with a native queue, when one more request may come: until then Triton keeps the others
        in its queue, in the order and under the bounds and time limits of `config.pbtxt`.
        """
        for request in requests:
            self._instance.submit(request)
            self._instance.wait_for_room()

    def finalize(self) -> None:
        self._instance.close()
