"""Messages of front ends and engine: msgspec structs over a ZeroMQ ipc socket, never pickle.

To the engine: `Hello` first, then `AddRequest`, `Cancel`, `CloseSession`, `Ping`, `Drain`, `Goodbye`. From it:
`Ready` or `Failed` after `Hello`; `Deltas` after a step; `Stats` twice a second; `Room` when it changes; `Dropped` to
an unknown front end. `Drain` needs no `Hello`; `Stats` answers it.

A request's `key` counts up in its front end; the client's id never travels. Deltas answer every `AddRequest`, the
last with `finish_reason`, or `Dropped` ends all requests of a front end.
"""

from __future__ import annotations

import msgspec

from tidewheel.batch import TopLogprobs
from tidewheel.sampling import SamplingParams
from tidewheel.stats import EngineStats, WaitingRoom
from tidewheel.tenants import TenantLimits

PROTOCOL = 3
WHOLE_REQUEST = -1  # index of a delta for a request without sequences


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# --- front end → engine ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    protocol: int
    client: str  # unique name
    settings_digest: str  # of expected settings; a twin sends "" and takes any


class AddRequest(Message, frozen=True):
    key: int
    prompt: bytes  # int32 little endian token ids
    sampling: SamplingParams  # `stop` and `bad_words` stay in the front end; `logit_bias` is packed below
    stop_token_ids: tuple[int, ...] = ()  # its own, and end-of-sequence ids unless ignored
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 3
    cache_salt: str = ""
    arrival_ns: int = 0  # monotonic clock, shared by a host's processes
    n: int = 1  # sequences of a prompt, by `index` in deltas
    tenant: str = ""
    deadline_ns: int = 0  # monotonic clock; 0: none
    soft_deadline_ns: int = 0
    session_id: str = ""
    session_ttl_s: float | None = None  # None: the engine's default
    bias_token_ids: bytes = b""  # int32 little endian, ascending; from `pack_biases`
    bias_amounts: bytes = b""  # float32 little endian


class Cancel(Message, frozen=True):
    keys: list[int]
    sequences: list[tuple[int, int]] = []  # (key, index) of single sequences; siblings continue


class CloseSession(Message, frozen=True):
    """Answered by one delta: finish_reason "stop", or an error such as `NotFound`."""

    key: int
    tenant: str
    session_id: str


class Ping(Message, frozen=True):
    """Sent every second. After 5 s of silence a front end's requests end."""

    refused: dict[str, int] = {}  # by tenant, since the last ping; the waiting set was full


class Drain(Message, frozen=True):
    """Order to refuse all new requests. Accepted ones continue."""


class Goodbye(Message, frozen=True):
    pass


ToEngine = Hello | AddRequest | Cancel | CloseSession | Ping | Drain | Goodbye


# --- engine → front end ---------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """Values that the engine resolved at its load. Memory is in bytes."""

    pid: int
    model: str
    architecture: str
    device: str  # "cpu (2 threads)", "NVIDIA H200"
    dtype: str
    vocab_size: int  # output width
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weights_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    enable_prefix_caching: bool
    load_seconds: float
    num_host_blocks: int = 0
    swap_seconds_per_block: float | None = None  # per copy in one direction; None: no host tier
    graph_bytes: int = 0  # of CUDA graphs
    stage_seconds: dict[str, float] = {}  # of the load, in order
    async_scheduling: bool = False  # a step is launched before the last one's tokens are read
    tenants: dict[str, TenantLimits] = {}

    @property
    def num_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_num_tokens(self) -> int:
        """Longest prompt and output. The last token is never cached."""
        return min(self.max_model_len, self.num_cache_tokens + 1)

    @property
    def max_concurrency(self) -> float:
        return self.num_cache_tokens / self.max_model_len


class Ready(Message, frozen=True):
    info: EngineInfo


class Failed(Message, frozen=True):
    """Final refusal of this front end."""

    message: str


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `TidewheelError` on the wire, for `errors.from_wire`."""

    tag: str
    message: str
    retry_after_ms: int | None = None
    is_waiting_set_full: bool = False  # may be sent again as soon as another request starts


class Dropped(Message, frozen=True):
    """End of all requests of a front end that the engine no longer knows. The last message of an engine, or the
    answer to a front end that counts as gone. `Hello` starts anew.
    """

    error: ErrorInfo


class RequestStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of one ended sequence. Times are ns of the monotonic clock; 0 means never."""

    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_cached_tokens: int = 0
    num_reused_blocks: int = 0
    num_new_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0  # granted class, 1 to 4
    arrival_ns: int = 0  # set by the front end


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: int
    token_ids: list[int]
    finish_reason: str = ""  # a `FinishReason`; empty before the end
    error: ErrorInfo | None = None  # with finish_reason "error"
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    stats: RequestStats | None = None
    index: int = 0  # of the sequence; each has a last delta, or `WHOLE_REQUEST` ends all


class Deltas(Message, frozen=True):
    deltas: list[Delta]


class Stats(Message, frozen=True):
    stats: EngineStats


class Room(Message, WaitingRoom, frozen=True):
    """Room in the waiting set, sent when it changes. It lets front ends refuse at once what the engine would refuse
    after its step.
    """

    received: list[int]  # keys of the front end's requests since the last `Room`


FromEngine = Ready | Failed | Dropped | Deltas | Stats | Room

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
