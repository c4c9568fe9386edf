"""The host tier's memory: what it holds, what is copied, who waits for whom, and settings that cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tidewheel.batch import NO_TRANSFERS, ScheduledBatch, TransferArrays
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InternalError
from tidewheel.models.causal_lm import ModelShape
from tidewheel.runner import host_tier
from tidewheel.runner.host_memory import available_host_bytes, host_limits, total_host_bytes
from tidewheel.runner.host_tier import BlockTransfers, HostBlocks, decide_num_host_blocks
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.settings import GIB

SHAPE = ModelShape(num_layers=2, num_kv_heads=3, head_dim=8, vocab_size=10, hidden_size=24, intermediate_size=48)
LAYOUT = CacheLayout(SHAPE, 16, torch.float32)
CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def numbered_cache(num_blocks: int) -> KVTensors:
    """Every element of every block differs from all others."""
    kv = KVTensors(LAYOUT, num_blocks, CPU)
    kv.blocks.copy_(torch.arange(kv.blocks.numel(), dtype=torch.float32).view(kv.blocks.shape))
    return kv


def batch(step_id: int = 0, **columns: np.ndarray) -> ScheduledBatch:
    moves = {name: columns.pop(name) for name in TransferArrays._fields if name in columns}
    return ScheduledBatch(
        step_id=step_id, rows=int32(0), start_positions=int32(0), num_scheduled_tokens=int32(1),
        samples=np.array([True]), num_decodes=1, num_tokens=1,
        transfers=NO_TRANSFERS._replace(**moves), **columns,
    )  # fmt: skip


SMALL_MEMORY = {"SLAB_BYTES": 2 * LAYOUT.block_bytes, "STAGING_BYTES": 3 * LAYOUT.block_bytes}


@pytest.mark.parametrize("memory", [{}, SMALL_MEMORY], ids=["one slab", "slabs and chunks"])
def test_blocks_go_out_and_come_back_as_they_were(memory: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, num_bytes in memory.items():
        monkeypatch.setattr(host_tier, name, num_bytes)
    kv = numbered_cache(8)
    before = kv.blocks.clone()
    host = HostBlocks(kv, 7)
    assert len(host._slabs) == (4 if memory else 1)
    assert sum(slab.nbytes for slab in host._slabs) == 7 * LAYOUT.block_bytes
    blocks, slots = int32(5, 0, 3, 7, 1), int32(6, 2, 0, 5, 3)
    host.write_out(blocks, slots)
    for block_id, slot in zip(blocks, slots, strict=True):
        assert torch.equal(host.slot(slot), before[block_id])
    kv.blocks.fill_(float("nan"))
    host.read_in(slots[:4], int32(2, 6, 4, 0))
    for target, block_id in zip((2, 6, 4, 0), blocks, strict=False):
        assert torch.equal(kv.blocks[target], before[block_id])
    assert kv.blocks[1].isnan().all()


def test_a_batch_moves_out_then_in_then_copies() -> None:
    kv = numbered_cache(4)
    before = kv.blocks.clone()
    transfers = BlockTransfers(kv, HostBlocks(kv, 2))
    transfers.start(batch(swap_out_blocks=int32(0), swap_out_slots=int32(1)))
    columns = {"swap_out_blocks": int32(2), "swap_out_slots": int32(0)}
    columns |= {"swap_in_slots": int32(1), "swap_in_blocks": int32(2)}
    transfers.start(batch(**columns, copy_sources=int32(3), copy_targets=int32(0)))
    assert torch.equal(kv.blocks[2], before[0])
    assert torch.equal(kv.blocks[0], before[3])
    transfers.start(batch(swap_in_slots=int32(0), swap_in_blocks=int32(1)))
    assert torch.equal(kv.blocks[1], before[2])


class RecordedSide:
    """Tells when copies were queued and when the computation was made to wait for them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        self.events.append("copies")
        yield

    def join(self) -> None:
        self.events.append("join")

    def synchronize(self) -> None:
        self.events.append("synchronize")


OUT = {"swap_out_blocks": int32(3), "swap_out_slots": int32(0)}
TAKEN = {"block_rows": int32(0), "block_indices": int32(0), "block_ids": int32(3)}
IN = {"swap_in_slots": int32(1), "swap_in_blocks": int32(2)}


@pytest.mark.parametrize(
    ("columns", "events"),
    [
        ({}, ["next step"]),
        ({"copy_sources": int32(0), "copy_targets": int32(1)}, ["next step"]),
        (OUT, ["copies", "next step", "join"]),
        (IN, ["copies", "join", "next step"]),
        ({**OUT, **IN}, ["copies", "join", "next step"]),
        (OUT | TAKEN, ["copies", "join", "next step"]),
        (OUT | {"copy_sources": int32(0), "copy_targets": int32(3)}, ["copies", "join", "next step"]),
    ],
    ids=["nothing", "copies inside", "out", "in", "both", "out of a block that is taken", "out of a copy's target"],
)
def test_the_computation_waits_for_no_more_than_it_must(columns: dict[str, np.ndarray], events: list[str]) -> None:
    kv, side = numbered_cache(4), RecordedSide()
    transfers = BlockTransfers(kv, HostBlocks(kv, 2), side)
    transfers.start(batch(**columns))
    side.events.append("next step")
    transfers.start(batch(1))
    assert side.events == events


def test_the_time_of_a_copy_is_measured_after_a_first_one() -> None:
    kv, side = numbered_cache(4), RecordedSide()
    seconds = BlockTransfers(kv, HostBlocks(kv, 3), side).seconds_per_block()
    assert seconds is not None and seconds > 0.0
    assert side.events == ["copies", "synchronize"] * 2
    assert BlockTransfers(kv, None, side).seconds_per_block() is None


def test_a_swap_without_a_tier_and_a_copy_that_fails_are_told() -> None:
    kv = numbered_cache(4)
    with pytest.raises(InternalError, match="step 3 swaps blocks, and there is no host tier"):
        BlockTransfers(kv, None).start(batch(3, **OUT))

    class Refusing(RecordedSide):
        def running(self) -> AbstractContextManager[None]:
            raise RuntimeError("out of memory")

    with pytest.raises(InternalError, match="step 4: blocks could not be copied: out of memory"):
        BlockTransfers(kv, HostBlocks(kv, 1), Refusing()).start(batch(4, **OUT))


def test_the_setting_is_in_gib_and_must_be_possible() -> None:
    assert decide_num_host_blocks(0.0, LAYOUT, 1 << 40) == 0
    assert decide_num_host_blocks(1.0, LAYOUT, 1 << 40) == GIB // LAYOUT.block_bytes
    with pytest.raises(ConfigError, match=r"swap_space is 3 GiB, but 2.0 GiB of host memory are available: lower it"):
        decide_num_host_blocks(3.0, LAYOUT, 2 * GIB)
    with pytest.raises(ConfigError, match=r"swap_space is 1e-06 GiB, which does not hold one block of"):
        decide_num_host_blocks(1e-6, LAYOUT, 1 << 40)


def write(root: Path, **texts: str) -> None:
    """Write files; in their names `__` stands for a slash."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:  9000 kB\nMemAvailable:  4000 kB\n"


def test_available_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n")
    assert available_host_bytes(tmp_path) == 4000 * 1024
    folder = tmp_path / "sys/fs/cgroup"
    write(folder, **{"memory.max": "max\n", "memory.current": "1000\n"})
    assert available_host_bytes(tmp_path) == 4000 * 1024
    write(folder, **{"memory.max": "3000\n"})
    assert available_host_bytes(tmp_path) == 2000
    write(folder, **{"memory.current": "5000\n"})
    assert available_host_bytes(tmp_path) == 0
    write(folder, **{"memory.stat": "anon 9\nactive_file 600\ninactive_file 2900\nfile_dirty 7\n"})
    assert available_host_bytes(tmp_path) == 1500  # pages of files can be dropped


def test_a_limit_of_a_group_further_out_holds_too(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/user.slice/shell\n")
    write(tmp_path / "sys/fs/cgroup/user.slice", **{"memory.max": "3000", "memory.current": "1000"})
    write(tmp_path / "sys/fs/cgroup/user.slice/shell", **{"memory.max": "max", "memory.current": "10"})
    assert available_host_bytes(tmp_path) == 2000
    number = (tmp_path / "sys/fs/cgroup/user.slice").stat().st_ino
    assert host_limits(tmp_path) == {"cpu": 9000 * 1024, f"cpu {number}": 3000}
    assert total_host_bytes(tmp_path) == 3000


def with_swap(config: EngineConfig, **changes: object) -> ModelRunner:
    return ModelRunner.load(dataclasses.replace(config, swap_space=0.01, **changes))


def test_a_runner_says_what_its_tier_holds(config: EngineConfig) -> None:
    info = with_swap(config).info
    assert info.num_host_blocks == int(0.01 * GIB) // (info.kv_cache_bytes // info.num_blocks)
    assert info.swap_seconds_per_block is not None and info.swap_seconds_per_block > 0.0
    plain = ModelRunner.load(config).info
    assert (plain.num_host_blocks, plain.swap_seconds_per_block) == (0, None)


def test_a_tier_larger_than_the_memory_stops_the_load(config: EngineConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"swap_space is 4096 GiB, but .* GiB of host memory are available"
    ) as caught:
        ModelRunner.load(dataclasses.replace(config, swap_space=4096.0))
    assert "\n" not in str(caught.value)
