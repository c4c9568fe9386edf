"""The front end's log lines, in Triton's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

from tidewheel.engine.describe import describe
from tidewheel.engine.messages import EngineInfo


class TritonHandler(logging.Handler):
    """Passes records of Python's logging on to Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(line)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(line)
        else:
            pb_utils.Logger.log_info(line)


def route_logging() -> None:
    """Sends what the package logs, from INFO up, to Triton's log."""
    logger = logging.getLogger("tidewheel")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [TritonHandler()]


def log_engine_info(info: EngineInfo) -> None:
    """The memory split and what fits, in the lines that people of this field look for."""
    for line in describe(info):
        pb_utils.Logger.log_info(line)
