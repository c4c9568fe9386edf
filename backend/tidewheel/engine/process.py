"""Engine process. It ends by SIGTERM, removal of its folder, or some time without front ends."""

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.config import EngineConfig
from tidewheel.engine import folder
from tidewheel.engine.build import (
    LoadedRunner,
    LoadRunner,
    RankedRunner,
    build_scheduler,
    engine_info,
    load_model_runner,
)
from tidewheel.engine.heartbeat import Heartbeat
from tidewheel.engine.messages import QUEUE_LIMIT, RETRY_AFTER_MS
from tidewheel.engine.server import EngineServer
from tidewheel.engine.shared_device import DEVICES, DeviceMemory, UnsharedDevice, share_device
from tidewheel.errors import ConfigError, Draining, EngineDead, InternalError, PermanentError
from tidewheel_process.locked_folder import try_lock

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
PREDECESSOR_LIMIT_S = 5.0

EXIT_CRASHED = 1
EXIT_LOAD_FAILED = 2


class StatusFile:
    def __init__(self, engine_dir: Path, settings: dict[str, object], identity: str) -> None:
        self.engine_dir = engine_dir
        self.identity = identity
        self._status = folder.first_status(os.getpid(), "loading", settings, identity)
        self._folder_inode = engine_dir.stat().st_ino
        self._written_at = 0.0
        self._inode = 0
        self._problem = ""

    def update(self, **changes: object) -> None:
        self._status = msgspec.structs.replace(self._status, **changes)
        self._written_at = time.monotonic()
        self._inode = 0
        self.keep()

    def keep(self) -> bool:
        """Write the status again if that failed before. Return False if the folder is gone."""
        path = self.engine_dir / folder.STATUS
        try:
            if self.engine_dir.stat().st_ino != self._folder_inode:
                return False
            if not self._inode or path.stat().st_ino != self._inode:
                folder.write_status(self.engine_dir, self._status)
                self._inode = path.stat().st_ino
        except FileNotFoundError:
            self._inode = 0
            return self.engine_dir.exists()
        except OSError as error:
            if self._problem != str(error):
                log.warning("the status cannot be written and is tried again: %s", error)
            self._problem = str(error)
        return True

    def progress(self, stage: str, fraction: float) -> None:
        if stage != self._status.stage or time.monotonic() - self._written_at >= PROGRESS_INTERVAL_S:
            with contextlib.suppress(OSError):  # the disk may be full
                self.update(stage=stage, fraction=fraction)


def serve(config: EngineConfig, engine_dir: Path, load: LoadRunner, identity: str) -> int:
    """Run the engine, unless another runs in the folder; return the exit code."""
    lock = try_lock(engine_dir / folder.ENGINE_LOCK, PREDECESSOR_LIMIT_S)
    if lock is None:
        log.error("another engine runs in this folder: stop it first")
        return EXIT_CRASHED
    with lock:
        status = StatusFile(engine_dir, config.to_settings(), identity)
        status.update()
        try:
            memory, name = DeviceMemory(config, engine_dir.parent / folder.CURRENT), engine_dir.parent.name
            runner = load(config, status.progress)
            memory.hold(runner.info)
            arbiter = UnsharedDevice() if config.is_remote else share_device(config, runner.info, DEVICES, name)
            with contextlib.closing(arbiter):
                return _serve_loaded(config, runner, status, arbiter)
        except ConfigError as error:
            log.error("the engine cannot start: %s", error)
            status.update(state="failed", message=str(error), is_given_up=isinstance(error, PermanentError))
            return EXIT_LOAD_FAILED


def _serve_loaded(config: EngineConfig, runner: LoadedRunner, status: StatusFile, arbiter: UnsharedDevice) -> int:
    info = engine_info(runner.info, config)
    scheduler = build_scheduler(config, info, time.monotonic)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))

    def must_stop() -> str:
        if isinstance(runner, RankedRunner):
            runner.check()
        if asked:
            return "it was asked to"
        return "" if status.keep() else "its folder is gone"

    with _bound_socket(status.engine_dir) as socket:
        server = EngineServer(
            socket,
            scheduler,
            runner,
            info,
            config=config,
            identity=status.identity,
            note=status.update,
            beat=Heartbeat(status.engine_dir).beat,
            arbiter=arbiter,
            lora_file=status.engine_dir.parent / folder.LORAS,
        )
        gc.collect()
        gc.freeze()  # collections between steps skip what loading made
        ranks = runner.ranks if isinstance(runner, RankedRunner) else []
        status.update(state="ready", stage="", fraction=1.0, info=info, ranks=ranks)
        log.info("ready")
        try:
            reason = server.serve(must_stop)
        except Exception as error:
            log.exception("a step failed; every request ends")
            log.error("engine died: %s: %s", type(error).__name__, error)
            status.update(state="crashed", message=str(error))  # before the last answers, so that no client returns
            reason = type(error).__name__
            if isinstance(runner, RankedRunner) and isinstance(error, InternalError):  # its message holds no path
                reason = error.message
            server.end_all(EngineDead(f"a step failed: {reason}", retry_after_ms=RETRY_AFTER_MS))
            return EXIT_CRASHED
        log.info("engine ends: %s", reason)
        status.update(state="stopped", message=reason)
        server.end_all(Draining("the engine was stopped"))
    return 0


@contextlib.contextmanager
def _bound_socket(engine_dir: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context(io_threads=1) as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set_hwm(QUEUE_LIMIT)
        socket.set(zmq.LINGER, 1000)  # ms for sent messages
        socket.bind(folder.socket_address(engine_dir))
        yield socket


def main(argv: Sequence[str] | None = None, *, load: LoadRunner = load_model_runner) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--identity", default="")
    arguments = parser.parse_args(argv)
    protect_texts()
    log_to_stderr(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(b"tidewheel-eng\n")
    engine_dir, identity = arguments.engine_dir, arguments.identity
    try:
        config = EngineConfig.from_settings(arguments.settings)
    except ConfigError as error:
        StatusFile(engine_dir, arguments.settings, identity).update(
            state="failed", message=f"the engine does not know these settings: {error}", is_given_up=True
        )
        return EXIT_LOAD_FAILED
    try:
        return serve(config, engine_dir, load, identity)
    except Exception as error:
        log.exception("the engine could not start")
        log.error("engine died: %s: %s", type(error).__name__, error)
        return EXIT_CRASHED


def exit_now(code: int) -> None:
    """End the process without the interpreter's clean-up, which can hang on a failed device."""
    with contextlib.suppress(OSError):
        logging.shutdown()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
