"""Messages of front ends and engine: msgspec structs over a ZeroMQ ipc socket, never pickle.

Front end → engine: `Hello` first, then `AddRequest`, `Cancel`, `CloseSession`, `Ping`, `Drain`, `Goodbye`. Engine →
front end: `Ready` or `Failed` after `Hello`; `Deltas` after a step; `Stats` twice a second; `Room` when it changes;
`Dropped` to an unknown front end. `Drain` needs no `Hello` and is answered with `Stats`.

A `key`, which the front end counts up, names a request; the client's id never travels. Deltas answer every
`AddRequest`, the last one with `finish_reason`. Or `Dropped` ends all requests of a front end.
"""

from __future__ import annotations

import msgspec

from tidewheel.batch import TopLogprobs
from tidewheel.sampling import SamplingParams
from tidewheel.stats import EngineStats, WaitingRoom
from tidewheel.tenants import TenantLimits

PROTOCOL = 3
WHOLE_REQUEST = -1  # index of a delta that answers a request without sequences


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# --- front end → engine ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    protocol: int
    client: str  # unique name
    settings_digest: str  # of the expected settings; a twin sends "" and takes any


class AddRequest(Message, frozen=True):
    key: int
    prompt: bytes  # int32 little endian token ids
    sampling: SamplingParams  # `stop` and `bad_words` stay in the front end, `logit_bias` is below
    stop_token_ids: tuple[int, ...] = ()  # its own, and end-of-sequence ids unless ignored
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 3
    cache_salt: str = ""
    arrival_ns: int = 0  # monotonic clock, shared by all processes of a host
    n: int = 1  # sequences of one prompt; deltas carry their `index`
    tenant: str = ""
    deadline_ns: int = 0  # monotonic clock; 0: none
    soft_deadline_ns: int = 0
    session_id: str = ""
    session_ttl_s: float | None = None  # None: the engine's default
    bias_token_ids: bytes = b""  # int32 little endian, ascending; from `pack_biases`
    bias_amounts: bytes = b""  # float32 little endian


class Cancel(Message, frozen=True):
    keys: list[int]
    sequences: list[tuple[int, int]] = []  # (key, index); siblings continue


class CloseSession(Message, frozen=True):
    """Answered by one delta, with finish_reason "stop" or an error such as `NotFound`."""

    key: int
    tenant: str
    session_id: str


class Ping(Message, frozen=True):
    """Sign of life, every second. After 5 s of silence a front end's requests end."""

    refused: dict[str, int] = {}  # by tenant, since the last ping, as the waiting set was full


class Drain(Message, frozen=True):
    """Refuse new requests of all front ends. Accepted ones continue."""


class Goodbye(Message, frozen=True):
    pass


ToEngine = Hello | AddRequest | Cancel | CloseSession | Ping | Drain | Goodbye


# --- engine → front end ---------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """Values resolved when the model was loaded. Memory is in bytes."""

    pid: int
    model: str  # folder
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
    num_host_blocks: int = 0  # of the host tier
    swap_seconds_per_block: float | None = None  # per copy in one direction; None: no host tier
    graph_bytes: int = 0  # of CUDA graphs
    stage_seconds: dict[str, float] = {}  # of the load, in order
    async_scheduling: bool = False  # a step is launched before the last one's tokens are read
    tenants: dict[str, TenantLimits] = {}  # as configured

    @property
    def num_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_num_tokens(self) -> int:
        """Longest prompt and output of a request. The last token is never cached."""
        return min(self.max_model_len, self.num_cache_tokens + 1)

    @property
    def max_concurrency(self) -> float:
        """Full-length requests that fit the cache."""
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
    is_waiting_set_full: bool = False  # may be sent again once another request has started


class Dropped(Message, frozen=True):
    """End of all requests of a front end that the engine no longer knows: it counts as gone, or the engine ends.
    `Hello` starts anew.
    """

    error: ErrorInfo


class RequestStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of one sequence, with its last delta. Times are ns of the monotonic clock; 0 means never."""

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
    """New tokens of a request, its end, or both."""

    key: int
    token_ids: list[int]
    finish_reason: str = ""  # a `FinishReason`; empty before the end
    error: ErrorInfo | None = None  # with finish_reason "error"
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    stats: RequestStats | None = None
    index: int = 0  # of the sequence; each has a last delta, or one `WHOLE_REQUEST` ends all


class Deltas(Message, frozen=True):
    deltas: list[Delta]


class Stats(Message, frozen=True):
    stats: EngineStats


class Room(Message, WaitingRoom, frozen=True):
    """Room in the waiting set, sent when it changes. With it a front end refuses at once what the engine would refuse
    after its step.
    """

    received: list[int]  # keys of this front end's requests since the last message


FromEngine = Ready | Failed | Dropped | Deltas | Stats | Room

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
