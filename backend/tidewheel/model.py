"""Triton's entry point to models with `backend: "tidewheel"`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

# The stub for Python 3.12 ignores PYTHONPATH, where `tidewheel serve` puts this package.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]

import tidewheel  # noqa: E402
from tidewheel.adapter.autocomplete import complete  # noqa: E402
from tidewheel.adapter.instance import ModelInstance  # noqa: E402
from tidewheel.errors import ConfigError, TidewheelError  # noqa: E402


class TritonPythonModel:
    """One front end. Triton runs each instance in its own process."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        try:
            return complete(auto_complete_model_config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: Mapping[str, str]) -> None:
        # Triton imports this file as `model`, so log which package it found.
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: engine package {tidewheel.__file__}")
        try:
            self._instance = ModelInstance.open(args)
        except (ConfigError, TidewheelError) as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit requests. Their response senders take the answers.

        With a native queue, return when one more request may come. Until then Triton queues requests by the order,
        bounds and time limits of `config.pbtxt`.
        """
        for request in requests:
            self._instance.submit(request)
            self._instance.wait_for_room()

    def finalize(self) -> None:
        self._instance.close()
