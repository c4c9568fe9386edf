"""A loaded engine in log lines."""

from __future__ import annotations

import msgspec

from tidewheel.engine.messages import EngineInfo

INFO = EngineInfo(
    pid=1, model="/m", architecture="LlamaForCausalLM", device="cpu (1 threads)", dtype="float32", vocab_size=100,
    max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=2048, block_size=16, num_blocks=2048,
    weights_bytes=12 << 20, activation_bytes=1 << 20, kv_cache_bytes=32 << 20, enable_prefix_caching=True,
    load_seconds=0.5,
)  # fmt: skip


def test_a_host_tier_is_described_where_there_is_one() -> None:
    with_tier = msgspec.structs.replace(INFO, num_host_blocks=4096, swap_seconds_per_block=0.00025)
    plain = INFO.describe()
    assert "CPU KV cache size: 32,768 tokens" in plain
    assert "KV cache 32 MiB: 2,048 blocks of 16 tokens" in plain
    assert plain[1] == "memory: weights 12 MiB, activations 1 MiB"
    assert "graphs 3 MiB" in msgspec.structs.replace(INFO, graph_bytes=3 << 20).describe()[1]
    assert "async scheduling: off" in plain
    assert "async scheduling: on" in msgspec.structs.replace(INFO, async_scheduling=True).describe()
    assert with_tier.describe() == [*plain, "host tier: 4,096 blocks, 0.250 ms to copy one"]


def test_the_time_of_the_load_is_split_where_it_is_known() -> None:
    assert INFO.describe()[0].endswith("loaded in 0.5 s")
    split = msgspec.structs.replace(INFO, stage_seconds={"weights": 0.3, "graphs": 0.2})
    assert split.describe()[0].endswith("loaded in 0.5 s (weights 0.3, graphs 0.2)")
