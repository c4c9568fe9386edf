"""Engines that share a device take no more of its memory than it has, whoever else has some."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tidewheel.config import EngineConfig
from tidewheel.engine import shared_device
from tidewheel.engine.shared_device import DeviceMemory
from tidewheel.errors import ConfigError
from tidewheel.runner import host_memory
from tidewheel.runner.info import RunnerInfo
from tidewheel.settings import MIB

INFO = RunnerInfo(
    model="m", architecture="a", device="cpu (2 threads)", vocab_size=1, max_model_len=1, max_num_seqs=1,
    max_num_batched_tokens=1, block_size=1, weights_bytes=600 * MIB, kv_cache_bytes=300 * MIB,
)  # fmt: skip
TOTAL = 1000 * MIB
HOLDER = f"""
import sys
from pathlib import Path
from tidewheel.config import EngineConfig
from tidewheel.engine import shared_device
shared_device.host_limits = lambda: {{"cpu": {TOTAL}}}
shared_device.shown_records = lambda *_: []  # of other tests
memory = shared_device.DeviceMemory(EngineConfig(model="m", device="cpu", device_memory_share=0.6), Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""
Load = Callable[..., DeviceMemory]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Processes that are seen: engines of other tests come and go."""
    gc.collect()
    read, known = host_memory._read_record, {str(os.getpid())}
    monkeypatch.setattr(
        host_memory, "_read_record", lambda link, *kind: read(link, *kind) if link.parts[2] in known else None
    )
    monkeypatch.setattr(shared_device, "host_limits", lambda: {"cpu": TOTAL})
    monkeypatch.setattr(shared_device, "resident_bytes", lambda _pid: 100 * MIB)
    return known


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Loads an engine of a model, as far as its memory goes."""
    engines: list[DeviceMemory] = []

    def load(model: str, info: RunnerInfo = INFO, run: str = "server", **settings: Any) -> DeviceMemory:
        folder = tmp_path / run / f"{model}-1a2b3c4d" / "current"
        memory = DeviceMemory(EngineConfig(model="m", **{"device": "cpu", **settings}), folder)
        memory.hold(info)
        engines.append(memory)
        return memory

    yield load
    engines.clear()


def small(num_mib: int) -> RunnerInfo:
    return replace(INFO, weights_bytes=num_mib * MIB, kv_cache_bytes=0)


def test_the_error_names_who_has_the_memory_and_what_would_fit(load: Load) -> None:
    load("demo", device_memory_share=0.9)
    with pytest.raises(ConfigError) as caught:
        load("other", device_memory_share=0.6)
    assert str(caught.value) == (
        f"device_memory_share is 0.6 of 1000 MiB of host memory, and 100 MiB are left: demo (process {os.getpid()}) "
        "has 900 MiB; set it to at most 0.1, or unload one of these"
    )
    load("other", small(90), device_memory_share=0.1)
    with pytest.raises(ConfigError, match=r"0 MiB are left: demo .* 900 MiB and other .* 100 MiB; unload one"):
        load("third", small(90), device_memory_share=0.1)
    for model in ("third", "fourth"):
        load(model, small(10))
    with pytest.raises(ConfigError, match=r"left: demo .* and other .* and third .* and fourth .*; unload one"):
        load("fifth", small(90), device_memory_share=0.1)


def test_what_an_engine_without_a_limit_holds_counts(load: Load) -> None:
    load("demo")  # 900 MiB
    with pytest.raises(ConfigError, match=r"100 MiB are left: demo \(process \d+\) has 900 MiB"):
        load("other", device_memory_share=0.6)
    load("unlimited")  # what it may take is asked elsewhere


def test_an_engine_is_loaded_beside_its_predecessor_but_not_beside_that_of_another_server(load: Load) -> None:
    load("demo", device_memory_share=0.9)
    load("demo", device_memory_share=0.9)
    with pytest.raises(ConfigError, match=r"0 MiB are left: demo .* and demo"):
        load("demo", run="another server", device_memory_share=0.9)


def test_an_engine_takes_no_more_than_its_limit(load: Load) -> None:
    load("demo", device_memory_share=0.9)
    gc.collect()
    with pytest.raises(ConfigError, match=r"device_memory_share is 0\.8 of 1000 MiB, and the engine takes 900 MiB"):
        load("demo", device_memory_share=0.8)


def test_engines_in_other_cgroups_take_memory_of_the_machine_alone(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_in(group: str, name: str, share: float) -> None:
        limits = {"cpu": TOTAL, **({group: TOTAL // 2} if group else {})}
        monkeypatch.setattr(shared_device, "host_limits", lambda: limits)
        load(name, small(50), device_memory_share=share)

    load_in("cpu 7", "demo", 0.8)
    load_in("cpu 8", "other", 0.8)
    with pytest.raises(
        ConfigError, match=r"0\.3 of 500 MiB of host memory, and 100 MiB are left: demo .* at most 0\.2"
    ):
        load_in("cpu 7", "third", 0.3)
    with pytest.raises(
        ConfigError, match=r"0\.3 of 1000 MiB of host memory, and 200 MiB are left: demo .* and other"
    ):
        load_in("", "third", 0.3)
    load_in("", "third", 0.2)


def test_all_ranks_of_a_cpu_count_together(load: Load) -> None:
    half = replace(INFO, weights_bytes=300 * MIB, kv_cache_bytes=100 * MIB)
    load("demo", half, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"demo .* has 800 MiB"):
        load("other", device_memory_share=0.6)
    with pytest.raises(ConfigError, match="the engine takes 800 MiB"):
        load("demo", half, tensor_parallel_size=2, device_memory_share=0.7)


def test_ranks_have_their_limit_on_each_gpu(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(uuid=name, total_memory=TOTAL) for name in "abc"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr("tidewheel.runner.device.cuda_obstacle", lambda: "")
    info = replace(INFO, device="NVIDIA H100", weights_bytes=300 * MIB, kv_cache_bytes=100 * MIB)
    load("demo", info, device="cuda", tensor_parallel_size=2, device_memory_share=0.5)
    gpus[:] = gpus[1:]  # by CUDA_VISIBLE_DEVICES
    with pytest.raises(ConfigError, match=r"is 0\.6 of 1000 MiB of GPU-b, and 500 MiB are left: demo"):
        load("other", info, device="cuda", tensor_parallel_size=2, device_memory_share=0.6)
    gpus[:] = gpus[1:]
    load("other", info, device="cuda", device_memory_share=0.6)
    load("host", device_memory_share=0.9)


def test_a_one_shot_engine_takes_its_memory_after_its_load(load: Load) -> None:
    one_shot: dict[str, Any] = {"kind": "one_shot", "adapter": "onnxruntime"}
    load("a", small(100), device_memory_share=0.6, **one_shot)
    with pytest.raises(ConfigError, match="400 MiB are left: a "):
        load("b", small(100), device_memory_share=0.5, **one_shot)


def test_nothing_is_left_of_a_killed_engine(load: Load, known: set[str], tmp_path: Path) -> None:
    engine = tmp_path / "server" / "killed-1a2b3c4d" / "current"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(engine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        known.add(str(holder.pid))
        assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
        with pytest.raises(ConfigError, match=re.escape(f"killed (process {holder.pid}) has 600 MiB")):
            load("other", small(90), device_memory_share=0.5)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        load("other", small(90), device_memory_share=0.5)
