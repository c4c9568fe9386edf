from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.messages import RETRY_AFTER_MS
from tidewheel.errors import Busy, ConfigError, InternalError, InvalidRequest, NotFound, TidewheelError, Unsupported
from tidewheel.lora import MAX_LORA_NAMES, Lora, parse_loras
from tidewheel.private_dir import read_value, write_value
from tidewheel.request import FinishReason
from tidewheel.request_options import RequestOptions
from tidewheel.scheduler.lora_slots import LoraSlots
from tidewheel.settings import shown_bytes

log = logging.getLogger(__name__)

MAX_READS = 64  # that wait for the thread
RETRY_S = 10.0  # after which a request has a defective adapter read again
_SHOWN_NAMES = 8

Answer = Callable[..., None]  # gets `FinishReason.STOP` and a text, or the error of a failed order


@runtime_checkable
class LoraRunner(Protocol):
    def check_lora(self, folder: Path) -> None:
        """Raise `ConfigError` for a defect that shows without reading values."""

    def read_lora(self, folder: Path) -> Any:
        """Return an adapter's weights, on any thread. Raise `ConfigError`."""


class LoraRegistry:
    """Adapters of an engine by name. A thread reads weights; host memory holds those of `max_cpu_loras` adapters.

    All methods belong to the thread of the steps: weights come and go between two steps. `file` keeps the orders of
    clients, for the next engine. Raise `ConfigError` for malformed `lora_modules`.
    """

    def __init__(self, config: EngineConfig, runner: object, slots: LoraSlots, file: Path | None = None) -> None:
        self._is_enabled = config.enable_lora
        self._runner = runner
        self._slots = slots
        self._file = file
        self._executor: Executor = ThreadPoolExecutor(1, "loras")
        self._limit = max(config.max_cpu_loras or 4 * config.max_loras, config.max_loras + 1)
        self._versions = itertools.count(1)
        self._loras: dict[str, Lora] = {}  # newest versions, by name
        self._resident: OrderedDict[Lora, bool] = OrderedDict()  # least recently used first; whether it has run
        self._reads: dict[Lora, tuple[Future[Any], Answer | None]] = {}  # with the answer to an order
        # Folders by name (None: unloaded), each with the folder of `lora_modules` at that time.
        self._ordered = (file and read_value(file, dict[str, tuple[str | None, str | None]])) or {}
        self.take_settings(config)
        slots.load = self.load
        if config.enable_lora:
            self._check()

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def take_settings(self, config: EngineConfig) -> None:
        """Take the adapters of `lora_modules`. Orders of clients stand, unless the folder of their name changed."""
        self._lora_dir = Path(config.lora_dir)
        self._named = named = parse_loras(config.lora_modules)
        ordered = {name: folder for name, (folder, before) in self._ordered.items() if named.get(name) == before}
        wanted = {name: Path(folder) for name, folder in {**named, **ordered}.items() if folder}
        for name in {name for name, lora in self._loras.items() if wanted.get(name) != lora.folder}:
            self._retire(name)
        for name, folder in wanted.items():
            self._loras[name] = self._loras.get(name) or self._new(name, folder)

    def _check(self) -> None:
        """Log the defects of all adapters that show without reading values."""
        if not isinstance(self._runner, LoraRunner):
            raise ConfigError("enable_lora is true, and only native text models take adapters: leave it out")
        for lora in self._loras.values():
            try:
                self._runner.check_lora(lora.folder)
            except Exception as error:
                self._refuse(lora, error)
        log.info("adapters: %d", len(self._loras))

    def find(self, name: str) -> Lora | None:
        """Return the newest version of an adapter; None without a name.

        Raise `Unsupported`, `NotFound`, or the error of the last read.
        """
        lora = self._known(name) if name else None
        if lora is not None and lora.error is not None:
            if monotonic() < lora.retry_at:
                raise lora.error.with_traceback(None)
            self._loras[name] = lora = self._new(name, lora.folder)
        return lora

    def load(self, lora: Lora) -> None:
        """Have an adapter's weights read, unless host memory is full. Repeatable."""
        if lora.weights is not None or lora.error is not None or lora in self._reads:
            return
        if len(self._reads) < MAX_READS and self._make_room():
            self._reads[lora] = self._executor.submit(self._read, lora), None

    def take_order(self, options: RequestOptions, answer: Answer) -> None:
        """Carry out `lora_order`. Call `answer` once, here or in `poll`, or raise the order's error."""
        match options.lora_order:
            case "list":
                rows = [_describe(self._loras[name]) for name in sorted(self._loras)]
                answer(FinishReason.STOP, msgspec.json.encode(rows).decode())
            case "load":
                self.read_new(options.lora_name, self._lora_dir / options.lora_path, answer, below=self._lora_dir)
            case _:
                self._known(options.lora_name)
                self._retire(options.lora_name)
                self._note_order(options.lora_name, None)
                answer(FinishReason.STOP)

    def read_new(self, name: str, folder: Path, answer: Answer, *, below: Path | None = None) -> None:
        """Have a new version of an adapter read, from a folder below `below`.

        Raise `Unsupported`, `InvalidRequest` or `Busy`.
        """
        self._check_enabled()
        if name not in self._loras and len(self._loras) >= MAX_LORA_NAMES:
            raise InvalidRequest(f"{len(self._loras)} adapters are loaded: at most {MAX_LORA_NAMES} may; unload one")
        if len(self._reads) >= MAX_READS:
            raise Busy(f"{MAX_READS} adapters wait to be read: send it later", retry_after_ms=RETRY_AFTER_MS)
        lora = self._new(name, folder)
        self._reads[lora] = self._executor.submit(self._read, lora, below), answer

    def poll(self) -> None:
        """Take weights that were read since the last call. Call it between two steps."""
        for lora in self._slots.running if self._resident else ():
            if lora in self._resident:
                self._resident[lora] = True
                self._resident.move_to_end(lora)
        for lora, (read, answer) in list(self._reads.items()):
            if read.done():
                del self._reads[lora]
                self._finish(lora, read, answer)

    def wait(self) -> None:
        """Wait until something was read, for `poll`, or return at once if nothing is read."""
        wait([read for read, _ in self._reads.values()], return_when=FIRST_COMPLETED)

    def _finish(self, lora: Lora, done: Future[Any], answer: Answer | None) -> None:
        if (error := done.exception()) is not None:
            self._refuse(lora, error)
        else:
            weights = done.result()
            lora.rank = weights.rank
            if answer is not None:
                self._retire(lora.name)
                self._loras[lora.name] = lora
                self._note_order(lora.name, str(lora.folder))
            if self._make_room():
                lora.weights = weights
                self._resident[lora] = False
            log.info("LoRA %s is read: rank %d, %s", lora.name, lora.rank, shown_bytes(weights.num_bytes))
        if answer is not None:
            answer(lora.error or FinishReason.STOP)

    def _refuse(self, lora: Lora, error: BaseException) -> None:
        lora.error, lora.retry_at = _to_request_error(lora.name, error), monotonic() + RETRY_S
        log.warning("%s", lora.error.message)

    def _make_room(self) -> bool:
        """Drop weights until one more adapter fits. Return False if all are in use."""
        excess = len(self._resident) + len(self._reads) + 1 - self._limit
        if excess <= 0:
            return True
        running, waiting = self._slots.running, self._slots.waiting
        for lora, has_run in list(self._resident.items()):
            is_old = self._loras.get(lora.name) is not lora  # its folder may hold another version by now
            if lora not in running and (lora not in waiting or (has_run and not is_old)):
                lora.weights = None
                del self._resident[lora]
                excess -= 1
                if not excess:
                    return True
        return False

    def _new(self, name: str, folder: Path) -> Lora:
        return Lora(name, next(self._versions), folder)

    def _retire(self, name: str) -> None:
        """Forget a name, if it is known. Accepted requests keep their version, the first to be dropped after them."""
        old = self._loras.pop(name, None)
        if old is not None and old in self._resident:
            self._resident.move_to_end(old, last=False)

    def _note_order(self, name: str, folder: str | None) -> None:
        log.info("LoRA %s is %s by a client's order", name, f"loaded from {folder}" if folder else "unloaded")
        self._ordered[name] = folder, self._named.get(name)
        if folder is None and name not in self._named:
            del self._ordered[name]
        if self._file is not None:
            try:
                write_value(self._file, self._ordered)
            except OSError as error:
                log.warning("a later engine will not know of this: %s cannot be written (%s)", self._file, error)

    def _read(self, lora: Lora, below: Path | None = None) -> Any:
        """Return an adapter's weights. Runs on the reading thread."""
        folder = lora.folder.resolve()
        if below is not None:
            if not folder.is_relative_to(below.resolve()):
                raise InvalidRequest(f"lora_path leads to {folder}: it must lie below lora_dir, {below}")
            lora.folder = folder
        if not folder.is_dir():
            raise NotFound(f"there is no folder {folder}")
        stamp = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
        if lora.stamp not in (
            None,
            stamp,
        ):  # cached blocks are of the older files
            raise InvalidRequest("its files changed after they were read: load it again")
        lora.stamp = stamp
        assert isinstance(self._runner, LoraRunner)
        return self._runner.read_lora(folder)

    def _check_enabled(self) -> None:
        if not self._is_enabled:  # the first sentence is that of Triton's vLLM backend
            raise Unsupported("LoRA feature is not enabled. Set enable_lora to true")

    def _known(self, name: str) -> Lora:
        self._check_enabled()
        if name not in self._loras:
            names = list(self._loras)
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            # The words of Triton's vLLM backend, which its clients compare.
            raise NotFound(f"LoRA {name} is not supported, we currently support {names[:_SHOWN_NAMES]}{more}")
        return self._loras[name]


def _describe(lora: Lora) -> dict[str, object]:
    return {
        "name": lora.name,
        "path": str(lora.folder),
        "rank": lora.rank,  # None: not read yet
        "is_loaded": lora.weights is not None,
        "error": "" if lora.error is None else lora.error.message,
    }


def _to_request_error(name: str, error: BaseException) -> TidewheelError:
    if isinstance(error, ConfigError | OSError):
        error = InvalidRequest(str(error))
    elif not isinstance(error, TidewheelError):
        log.error("LoRA %s cannot be read", name, exc_info=error)
        error = InternalError("it cannot be read; the server's log says why")
    return type(error)(f"LoRA {name}: {error.message}")
