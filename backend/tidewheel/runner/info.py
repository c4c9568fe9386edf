"""What loading resolved."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """Facts about a loaded model, under the names of `engine.messages.EngineInfo`. Memory in bytes."""

    model: str  # folder of the model
    architecture: str
    device: str  # "cpu (2 threads)", "NVIDIA H200"
    dtype: str
    vocab_size: int  # output width of the model
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weights_bytes: int
    activation_bytes: int  # measured on a GPU, estimated from shapes on a CPU
    kv_cache_bytes: int
    load_seconds: float
    num_host_blocks: int = 0  # of the host tier
    swap_seconds_per_block: float | None = None  # of one copy in one direction, measured; None: no host tier
    graph_bytes: int = 0  # CUDA graphs of decode steps, measured; 0: there are none
    stage_seconds: dict[str, float] = field(default_factory=dict)  # how the time of the load was spent, in order
