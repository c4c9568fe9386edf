import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from tidewheel.config import EngineConfig
from tidewheel.engine.grammar_queue import result_of
from tidewheel.engine.messages import RETRY_AFTER_MS
from tidewheel.errors import Busy, ConfigError, InvalidRequest, NotFound, TidewheelError, Unsupported
from tidewheel.lora import MAX_LORA_NAMES, Lora, parse_loras
from tidewheel.private_dir import read_value, write_value
from tidewheel.request import FinishReason
from tidewheel.request_options import RequestOptions
from tidewheel.scheduler.lora_slots import LoraSlots
from tidewheel.settings import shown_bytes

log = logging.getLogger(__name__)

MAX_READS = 64  # queued for the reading thread
_SHOWN_NAMES = 8

Answer = Callable[..., None]  # gets `FinishReason.STOP` and a text, or the error of a failed order


class LoraRegistry:
    """Adapters of an engine by name. A thread reads weights; host memory holds those of `max_cpu_loras` adapters.

    All methods belong to the thread of the steps: weights come and go between two steps. `runner` reads adapters, on
    any thread. `file` keeps the orders of clients, for the next engine. Raise `ConfigError` for wrong `lora_modules`.
    """

    def __init__(self, config: EngineConfig, runner: Any, slots: LoraSlots, file: Path | None = None) -> None:
        self._is_enabled = config.enable_lora
        self._runner = runner
        self._slots = slots
        self._file = file if config.enable_lora else None
        self._executor: Executor = ThreadPoolExecutor(1, "loras")
        self._limit = max(config.max_cpu_loras or 4 * config.max_loras, config.max_loras + 1)
        self._versions = itertools.count(1)
        self._loras: dict[str, Lora] = {}  # newest versions, by name
        self._resident: OrderedDict[Lora, bool] = OrderedDict()  # least recently used first; whether it has run
        self.reads: dict[Lora, tuple[Future[Any], Answer | None]] = {}  # with the answer to an order
        # The file has `lora_modules` as it was at the last order, and the folders of all adapters after that order.
        saved = self._file and read_value(self._file, tuple[dict[str, str], dict[str, str]])
        self._configured, folders = saved or ({}, {})
        for name, folder in folders.items():
            self._add(name, folder)
        self.reconfigure(config)
        slots.load = self.load
        for lora in self._loras.values():
            try:
                runner.check_lora(lora.folder)
            except ConfigError as error:  # of requests for it
                log.warning("LoRA %s: %s", lora.name, error)

    def reconfigure(self, config: EngineConfig) -> None:
        """Apply a changed `lora_modules`. Adapters whose folder did not change there stay as orders have set them."""
        self._lora_dir = Path(config.lora_dir)
        before, self._configured = self._configured, parse_loras(config.lora_modules)
        for name in {**before, **self._configured}:
            folder = self._configured.get(name)
            if folder != before.get(name):
                self._retire(name)
                if folder is not None:
                    self._add(name, folder)

    def close(self) -> None:
        """Cancel queued reads, and drop the runner: this may be the last reference to its memory."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._runner = None

    def find(self, name: str) -> Lora | None:
        """Return the newest version of an adapter; None without a name. Raise `Unsupported` or `NotFound`."""
        if not name:
            return None
        self._check_enabled()
        if name not in self._loras:
            names = list(self._loras)
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            # The words of Triton's vLLM backend, which its clients compare.
            raise NotFound(f"LoRA {name} is not supported, we currently support {names[:_SHOWN_NAMES]}{more}")
        return self._loras[name]

    def load(self, lora: Lora) -> None:
        """Queue an adapter's weights to be read, unless host memory is full. Idempotent."""
        is_done = lora.weights is not None or lora.error is not None or lora in self.reads
        num_asked = sum(answer is None for _, answer in self.reads.values())
        if not is_done and len(self.reads) < MAX_READS and self._make_room(num_asked + 1):
            self.reads[lora] = self._executor.submit(self._read, lora), None

    def take_order(self, options: RequestOptions, answer: Answer) -> None:
        """Carry out `lora_order`. Call `answer` once, here or in `poll`, or raise the order's error."""
        name = options.lora_name
        if options.lora_order == "load":
            self._read_version(name, self._lora_dir / options.lora_path, answer)
        elif options.lora_order == "unload":
            self.find(name)
            self._retire(name)
            self._save()
            log.info("LoRA %s is unloaded by an order", name)
            answer(FinishReason.STOP)
        else:
            rows = [
                {"name": name, "path": str(lora.folder), "rank": lora.rank, "is_loaded": lora.weights is not None}
                for name, lora in sorted(self._loras.items())
            ]
            answer(FinishReason.STOP, msgspec.json.encode(rows).decode())

    def _read_version(self, name: str, folder: Path, answer: Answer) -> None:
        """Queue a new version of an adapter to be read, from a client's folder."""
        self._check_enabled()
        names = self._loras.keys() | {lora.name for lora in self.reads}
        if name not in names and len(names) >= MAX_LORA_NAMES:
            raise InvalidRequest(f"{len(names)} adapters are loaded: at most {MAX_LORA_NAMES} may; unload one")
        if len(self.reads) >= MAX_READS:
            raise Busy(f"{MAX_READS} adapters wait to be read: send the order later", retry_after_ms=RETRY_AFTER_MS)
        lora = Lora(name, next(self._versions), folder)
        self.reads[lora] = self._executor.submit(self._read, lora, self._lora_dir), answer

    def poll(self) -> None:
        """Take weights that were read since the last call. Call it between two steps."""
        for lora in self._slots.running if self._resident else ():
            if lora in self._resident:
                self._resident[lora] = True
                self._resident.move_to_end(lora)
        for lora, (read, answer) in list(self.reads.items()):
            if read.done():
                del self.reads[lora]
                self._take(lora, result_of(read, f"LoRA {lora.name} cannot be read"), answer)

    def wait(self) -> None:
        """Wait for all queued reads, and take their weights."""
        wait([read for read, _ in self.reads.values()])
        self.poll()

    def _take(self, lora: Lora, weights: Any, answer: Answer | None) -> None:
        if isinstance(weights, TidewheelError):
            lora.error = weights
            log.warning("%s", weights.message)
            if self._loras.get(lora.name) is lora:  # later requests have it read again
                self._add(lora.name, lora.folder)
        else:
            lora.rank = weights.rank
            log.info("LoRA %s is read: rank %d, %s", lora.name, lora.rank, shown_bytes(weights.num_bytes))
            if answer is not None:
                self._retire(lora.name)
                self._loras[lora.name] = lora
                self._save()
            if self._make_room(1):
                lora.weights = weights
                self._resident[lora] = False
        if answer is not None:
            answer(lora.error or FinishReason.STOP)

    def _make_room(self, count: int) -> bool:
        """Drop weights until `count` more adapters fit. Return False if all are in use."""
        excess = len(self._resident) + count - self._limit
        running, waiting = (self._slots.running, self._slots.waiting) if excess > 0 else (set(), set())
        for lora, has_run in list(self._resident.items()):
            is_old = self._loras.get(lora.name) is not lora  # its folder may hold another version by now
            if excess > 0 and lora not in running and (lora not in waiting or (has_run and not is_old)):
                lora.weights = None
                del self._resident[lora]
                excess -= 1
        return excess <= 0

    def _add(self, name: str, folder: str | Path) -> None:
        self._loras[name] = Lora(name, next(self._versions), Path(folder))

    def _retire(self, name: str) -> None:
        """Forget a name, if known. Accepted requests keep their version, whose weights are dropped first."""
        old = self._loras.pop(name, None)
        if old is not None and old in self._resident:
            self._resident.move_to_end(old, last=False)

    def _save(self) -> None:
        folders = {name: str(lora.folder) for name, lora in self._loras.items()}
        try:
            if self._file is not None:
                write_value(self._file, (self._configured, folders))
        except OSError as error:
            log.warning("orders about adapters end with this engine: %s cannot be written (%s)", self._file, error)

    def _read(self, lora: Lora, below: Path | None = None) -> Any:
        """Return an adapter's weights. Runs on the reading thread."""
        try:
            folder = lora.folder.resolve()
            if below is not None and not folder.is_relative_to(below.resolve()):
                raise InvalidRequest(f"lora_path leads to {folder}: it must lie below lora_dir, {below}")
            if not folder.is_dir():
                raise NotFound(f"LoRA {lora.name}: there is no folder {folder}")
            before = lora.stamp or _stamp(folder)  # cached blocks, and other ranks' parts, are of the same files
            weights = self._runner.read_lora(folder)
            if _stamp(folder) != before:
                raise InvalidRequest(f"LoRA {lora.name}: its files changed after they were read: load it again")
            lora.folder, lora.stamp = folder if below is not None else lora.folder, before
            return weights
        except (ConfigError, OSError) as error:
            raise InvalidRequest(f"LoRA {lora.name}: {error}") from None

    def _check_enabled(self) -> None:
        if not self._is_enabled:  # the first sentence is that of Triton's vLLM backend
            raise Unsupported("LoRA feature is not enabled. Set enable_lora to true")


def _stamp(folder: Path) -> object:
    """Return what changes with any file of a folder."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return [(name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats]
