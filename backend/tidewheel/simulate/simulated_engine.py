from __future__ import annotations

from tidewheel.config import EngineConfig
from tidewheel.engine.build import is_async
from tidewheel.engine.messages import EngineInfo
from tidewheel.simulate.cost_model import CostModel


def simulated_info(config: EngineConfig, cost: CostModel, *, max_model_len: int) -> EngineInfo:
    """Return what an engine on the cost model's device would resolve. Given settings come first."""
    block_size = config.block_size or cost.block_size
    num_blocks = config.num_blocks or cost.num_blocks * cost.block_size // block_size
    device = cost.device or cost.name
    cache_bytes = round(num_blocks * block_size * cost.kv_bytes_per_token)
    return EngineInfo(
        pid=0,
        model=config.model,
        architecture="simulated",
        device=device,
        dtype="",
        vocab_size=2**31 - 1,
        max_model_len=config.max_model_len or max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        weights_bytes=round(cost.weights_bytes),
        activation_bytes=0,
        kv_cache_bytes=cache_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        load_seconds=0.0,
        async_scheduling=is_async(config, device),
    )
