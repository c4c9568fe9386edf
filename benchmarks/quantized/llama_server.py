"""llama.cpp's server, from the package xllamacpp or from a program `llama-server`, with settings to search.

The package's wheel is built for AVX2. A program built with GGML_NATIVE uses all of the processor.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2

from common.serving import HTTP, free_ports
from common.study import BUILD

CONTEXT = 512  # tokens of a slot
LOOKUPS = ("ngram_simple", "ngram_map_k", "ngram_mod", "ngram_cache")  # kinds of drafts from the prompt
START_LIMIT_S = 120.0


class LlamaSettings(NamedTuple):
    threads: int
    slots: int  # requests at once
    batch: int = 2048  # tokens
    ubatch: int = 512  # tokens that are computed at once
    flash: str = "auto"  # attention: auto, on or off
    kv_unified: bool = False
    poll: int = 50  # how long threads spin for work: 0 to 100
    context: int = CONTEXT
    lookup: str = ""  # one of `LOOKUPS`; empty: no drafts

    def flags(self) -> list[str]:
        """Return the arguments of `llama-server`."""
        numbers = {"-t": self.threads, "-tb": self.threads, "-np": self.slots, "-b": self.batch, "-ub": self.ubatch}
        numbers |= {"--poll": self.poll, "-c": self.context * self.slots, "--cache-ram": 0}
        numbers |= {"--spec-type": self.lookup.replace("_", "-")} if self.lookup else {}
        named = [str(part) for pair in numbers.items() for part in pair]
        return [*named, "-fa", self.flash, "-kvu" if self.kv_unified else "-no-kvu"]


def candidates(cores: int, most_streams: int) -> Iterator[LlamaSettings]:
    """Yield llama.cpp's defaults for so many slots, then each with one other value."""
    first = LlamaSettings(cores, most_streams)
    yield first
    if cores > 1:
        yield first._replace(threads=cores - 1)
    yield first._replace(poll=0)
    yield first._replace(poll=100)
    yield first._replace(kv_unified=True)
    yield first._replace(flash="off")
    yield first._replace(batch=256, ubatch=128)
    for slots in (1, 4):
        if slots < most_streams:
            yield first._replace(slots=slots)


def best_by_streams(
    found: Mapping[LlamaSettings, Mapping[int, float]], streams: Sequence[int]
) -> dict[int, LlamaSettings]:
    """Return the settings with most tokens/s for each number of streams."""
    return {count: max(found, key=lambda one: found[one].get(count, 0.0)) for count in streams}


def command(program: Path | None, model: Path, port: int, settings: LlamaSettings) -> list[str]:
    """Return a server's command."""
    if program is not None:
        return [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *settings.flags()]
    run = "from quantized.llama_server import serve; serve()"
    return [sys.executable, "-c", run, str(model), str(port), json.dumps(settings)]


class LlamaServer:
    """A server in a process of its own, at `address`."""

    def __init__(self, program: Path | None, model: Path, settings: LlamaSettings) -> None:
        port = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._log = BUILD / "llama_server.log"
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command(program, model, port, settings),
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def wait_ready(self) -> None:
        """Raise RuntimeError if the server ends, or takes too long."""
        end = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"llama.cpp's server is not ready: see {self._log}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return HTTP.get(f"http://{self.address}/health").status_code == 200
        return False


@contextmanager
def llama_server(program: Path | None, model: Path, settings: LlamaSettings) -> Iterator[LlamaServer]:
    server = LlamaServer(program, model, settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def version(program: Path | None) -> str:
    """Return build and instructions, as llama.cpp names them. Raise SystemExit if it is not here."""
    if program is None:
        if importlib.util.find_spec("xllamacpp") is None:
            sys.exit("llama.cpp is not here: `pip install xllamacpp`, or give --llama-server PROGRAM")
        package = __import__("xllamacpp")
        return f"xllamacpp {package.__version__}: {package.get_system_info()}"
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True)
    return " ".join((done.stdout + done.stderr).split())


def serve() -> None:
    """Serve with the package, until killed: the arguments are model, port and settings."""
    import xllamacpp

    model, port, settings = sys.argv[1], int(sys.argv[2]), LlamaSettings(*json.loads(sys.argv[3]))
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port, params.ui = model, ["127.0.0.1"], port, False
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads, cpu.poll = settings.threads, settings.poll
    params.n_parallel, params.n_ctx, params.cache_ram_mib = settings.slots, settings.context * settings.slots, 0
    params.n_batch, params.n_ubatch, params.kv_unified = settings.batch, settings.ubatch, settings.kv_unified
    kinds = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}
    params.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{kinds[settings.flash]}"
    )
    if settings.lookup:
        types = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{settings.lookup.upper()}")]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)
