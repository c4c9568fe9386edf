"""Process of a rank that follows the engine's: it runs the steps that the engine sends, and ends with it."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
from functools import partial
from pathlib import Path

from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.shard import Shard
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.rank_group import JOINS, follow, join_group, receive
from tidewheel_process.current_process import end_with_parent

log = logging.getLogger(__name__)


def run(config: EngineConfig, rank: int, rendezvous: Path, connection: socket.socket) -> str:
    """Run the rank until the engine ends. Return the reason of an end before that."""
    try:
        connection.sendall(JOINS)
        shard = Shard(rank, config.tensor_parallel_size, join_group(config, rank, rendezvous))
        follow(ModelRunner.load(config, shard=shard), partial(receive, connection.makefile("rb")))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        log.exception("rank %d failed", rank)
        return f"rank {rank} failed: {type(error).__name__}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--socket", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(signal.SIGKILL)  # a stopped process takes no other signal
    protect_texts()
    log_to_stderr(logging.INFO, f"%(asctime)s %(levelname)s rank {arguments.rank}: %(message)s")
    faulthandler.enable()
    config = EngineConfig.from_settings(arguments.settings)
    with socket.socket(fileno=arguments.socket) as connection:
        reason = run(config, arguments.rank, arguments.rendezvous, connection)
        with contextlib.suppress(OSError):
            connection.sendall(reason.encode())
    os._exit(bool(reason))  # without the interpreter's clean-up, which can hang on a failed device


if __name__ == "__main__":
    main()
