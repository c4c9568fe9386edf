from __future__ import annotations

from collections.abc import Mapping

from tidewheel.engine.messages import EngineInfo

_MIB = 1 << 20


def describe(info: EngineInfo) -> list[str]:
    """Return the memory split, the cache size and the number of full-length requests that fit."""
    device = "CPU" if info.device.startswith("cpu") else "GPU"
    lines = [
        f"model: {info.architecture} in {info.dtype} on {info.device}, loaded in {info.load_seconds:.1f} s"
        f"{_stages(info.stage_seconds)}",
        f"memory: weights {_mib(info.weights_bytes)}, activations {_mib(info.activation_bytes)}, "
        f"graphs {_mib(info.graph_bytes)}, "
        f"KV cache {_mib(info.kv_cache_bytes)} ({info.num_blocks:,} blocks of {info.block_size} tokens)",
        f"{device} KV cache size: {info.num_cache_tokens:,} tokens",
        f"Maximum concurrency for {info.max_model_len:,} tokens per request: {info.max_concurrency:.2f}x",
        f"async scheduling: {'on' if info.async_scheduling else 'off'}",
    ]
    if info.swap_seconds_per_block is not None:
        milliseconds = 1e3 * info.swap_seconds_per_block
        lines.append(f"host tier: {info.num_host_blocks:,} blocks, {milliseconds:.3f} ms to copy one")
    return lines


def _stages(seconds: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{stage} {spent:.1f}' for stage, spent in seconds.items())})" if seconds else ""


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB"
