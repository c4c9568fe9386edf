"""The front end's log lines, in Triton's log."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

from tidewheel.engine.messages import EngineInfo

_MIB = 1 << 20


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
    device = "CPU" if info.device.startswith("cpu") else "GPU"
    for line in (
        f"model: {info.architecture} in {info.dtype} on {info.device}, loaded in {info.load_seconds:.1f} s",
        f"memory: weights {_mib(info.weights_bytes)}, activations {_mib(info.activation_bytes)}, "
        f"KV cache {_mib(info.kv_cache_bytes)} ({info.num_blocks:,} blocks of {info.block_size} tokens)",
        f"{device} KV cache size: {info.num_cache_tokens:,} tokens",
        f"Maximum concurrency for {info.max_model_len:,} tokens per request: {info.max_concurrency:.2f}x",
    ):
        pb_utils.Logger.log_info(line)


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
