from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

from tidewheel.confidential import TracebackFormatter


class TritonHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(line)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(line)
        else:
            pb_utils.Logger.log_info(line)


def route_logging() -> None:
    logger = logging.getLogger("tidewheel")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = TritonHandler()
    handler.setFormatter(TracebackFormatter())
    logger.handlers = [handler]
