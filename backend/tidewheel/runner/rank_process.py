"""Process of a rank that follows the engine's: it runs the steps that the engine sends, and ends with it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.shard import Shard
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.rank_group import HANG_S, RankStart, follow, join_group
from tidewheel.runner.step_messages import serve_reads
from tidewheel_process.current_process import end_with_parent

log = logging.getLogger(__name__)

LEADER_HANG_S = HANG_S + 0.15  # rank 0 may itself wait for a rank that hangs, and tells its clients
USED_S = 0.02  # processor time of a process that computes
GAP_S = 0.5  # between two calls of `LeaderWatch`, at least: between two waits


class LeaderWatch:
    """Killer of an engine that hangs: its process uses no processor time while this rank waits for it."""

    is_armed = False  # a load may wait for a disk

    def __init__(self) -> None:
        self._leader = os.getppid()  # with which this process ends
        self._clock = ~self._leader << 3 | 2  # of the process's processor time, see clock_getcpuclockid(3)
        self._called_at = self._since = self._used_s = 0.0

    def __call__(self) -> str:
        """Look at the engine. Call it again and again in a wait."""
        now, used_s = time.monotonic(), time.clock_gettime(self._clock)
        if now - self._called_at > GAP_S or used_s - self._used_s > USED_S:
            self._since, self._used_s = now, used_s
        self._called_at = now
        if self.is_armed and now - self._since > LEADER_HANG_S:
            log.error("engine died: rank 0 hangs in a step")
            os.kill(self._leader, signal.SIGKILL)
        return ""


def run(start: RankStart, connection: Connection) -> str:
    """Run the rank until the engine ends. Return the reason of an end before that."""
    try:
        connection.send_bytes(b"")  # it is about to join the group
        config, rank = EngineConfig.from_settings(start.settings), start.rank
        watch = LeaderWatch()
        shard = Shard(rank, config.tensor_parallel_size, join_group(config, rank, start.memory, watch))
        runner = ModelRunner.load(config, shard=shard)
        watch.is_armed = start.ends_engine
        gc.collect()
        gc.freeze()  # a collection of what loading made takes 0.1 s, for which all ranks would wait
        loras: dict[int, LoraWeights] = {}
        if config.enable_lora:
            serving = partial(serve_reads, Connection(start.loras), runner.read_lora, loras)
            threading.Thread(target=serving, name="loras", daemon=True).start()
        with contextlib.suppress(EOFError):
            follow(runner, connection.recv_bytes, loras)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        log.exception("the rank failed")
        return f"rank {start.rank} failed: {type(error).__name__}; its traceback is in the log"
    return ""


def main() -> None:
    start = msgspec.json.decode(sys.argv[1], type=RankStart)
    end_with_parent(signal.SIGKILL)  # a stopped process takes no other signal
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all end: a service manager signals all
        signal.signal(number, signal.SIG_IGN)
    protect_texts()
    log_to_stderr(logging.INFO, f"%(asctime)s %(levelname)s rank {start.rank}: %(message)s")
    faulthandler.enable()
    with Connection(start.steps) as connection:
        reason = run(start, connection)
        with contextlib.suppress(OSError):
            connection.send_bytes(reason.encode())
    os._exit(bool(reason))  # without the interpreter's clean-up, which can hang on a failed device


if __name__ == "__main__":
    main()
