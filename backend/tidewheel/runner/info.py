from __future__ import annotations

import msgspec


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model. Memory is in bytes. `engine.messages.EngineInfo` extends it."""

    model: str  # folder
    architecture: str
    is_native: bool = True  # runs on our decoder, not through transformers
    device: str  # "cpu (2 threads)", "NVIDIA H200"
    dtype: str
    kv_cache_dtype: str = ""  # empty: dtype
    vocab_size: int  # model's output width
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weights_bytes: int
    activation_bytes: int  # measured on a GPU, estimated from shapes on a CPU
    kv_cache_bytes: int
    cache_source: str = ""  # what gave the KV cache its size: "num_blocks 64", "half of the 9 GiB of memory to spare"
    shortened: str = ""  # log line, if max_model_len is less than the model's context because no more fits
    load_seconds: float
    num_host_blocks: int = 0  # in the host tier
    swap_seconds_per_block: float | None = None  # measured, one copy one way; None: no host tier
    graph_bytes: int = 0  # of decode steps, measured; 0: none
    device_bytes: int = 0  # memory of the GPU; 0: a CPU
    can_embed: bool = False
    stage_seconds: dict[str, float] = {}  # by load stage, in order
