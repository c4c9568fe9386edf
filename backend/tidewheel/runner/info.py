import msgspec

from tidewheel.one_shot.signature import Signature, StepOffer


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded model; memory in bytes."""

    model: str  # folder
    architecture: str
    is_native: bool = True  # not through transformers
    device: str  # e.g. "cpu (2 threads)"
    dtype: str = ""  # empty: of a model without text
    kv_cache_dtype: str = ""  # empty: dtype
    vocab_size: int = 1  # output width
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int = 0
    weights_bytes: int  # with a quantised copy
    copy_bytes: int = 0  # of the quantised copy; 0: none
    lora_bytes: int = 0  # of adapters' slots on a GPU, part of `weights_bytes`
    activation_bytes: int = 0  # measured on a GPU, estimated on a CPU
    kv_cache_bytes: int = 0
    cache_source: str = ""  # origin of its size: "num_blocks 64"
    shortened: str = ""  # log line, if memory shortens the context
    load_seconds: float = 0.0
    num_host_blocks: int = 0
    swap_seconds_per_block: float | None = None  # one way; None: no host tier
    graph_bytes: int = 0
    device_bytes: int = 0  # 0: a CPU
    stage_seconds: dict[str, float] = {}
    decode_seconds: list[tuple[int, float]] = []  # of steps by number of decodes, ascending; empty: not measured
    max_audio_samples: int = 0  # of a request, at 16 kHz; 0: the model takes no audio
    signature: Signature | None = None  # of a model without text
    offer: StepOffer | None = None  # of a model that takes many steps

    @property
    def takes_text(self) -> bool:
        return self.signature is None and not self.max_audio_samples
