"""What front ends and the engine say to each other: msgspec structs over a ZeroMQ ipc socket, never pickle.

Front end → engine: `Hello` first, then `AddRequest`, `Cancel`, `CloseSession`, `Ping`, `Drain`, `Goodbye`.
Engine → front end: `Ready` (or `Failed`) answers `Hello`; `Deltas` after a step; `Stats` a few times a second; `Room`
when it changes; `Dropped` to one that it does not know (any more). `Drain` is answered with `Stats`, and needs no
`Hello`.

A request is named by `key`, a number that its front end counts up; what a client calls it never travels. Every
`AddRequest` is answered by deltas, the last of which carries `finish_reason`, and nothing follows that one; or
`Dropped` ends all requests of a front end at once.
"""

from __future__ import annotations

import msgspec

from tidewheel.batch import TopLogprobs
from tidewheel.sampling import SamplingParams
from tidewheel.stats import EngineStats, WaitingRoom
from tidewheel.tenants import TenantLimits

PROTOCOL = 3
WHOLE_REQUEST = -1  # as the index of a delta: the answer to a request of which no sequence came to be


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# --- front end → engine ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    protocol: int
    client: str  # unique name of the front end
    settings_digest: str  # of the engine settings it expects; a twin sends "" and takes what is there


class AddRequest(Message, frozen=True):
    key: int
    prompt: bytes  # int32 little endian token ids
    sampling: SamplingParams  # `stop` and `bad_words` stay in the front end, `logit_bias` has fields of its own
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids unless ignored, and the request's own
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 3
    cache_salt: str = ""
    arrival_ns: int = 0  # monotonic clock, which all processes of a host share
    n: int = 1  # sequences that share the prompt; the deltas of each carry its `index`
    tenant: str = ""
    deadline_ns: int = 0  # monotonic clock; 0: none
    soft_deadline_ns: int = 0
    session_id: str = ""
    session_ttl_s: float | None = None  # None: the default of the engine
    bias_token_ids: bytes = b""  # int32 little endian, ascending; `pack_biases` makes both
    bias_amounts: bytes = b""  # float32 little endian, one for each id


class Cancel(Message, frozen=True):
    keys: list[int]
    sequences: list[tuple[int, int]] = []  # (key, index): one sequence of a request, the others go on


class CloseSession(Message, frozen=True):
    """Answered like a request: one delta with finish_reason "stop", or with the error NOT_FOUND."""

    key: int
    tenant: str
    session_id: str


class Ping(Message, frozen=True):
    """Sent every second by a front end that is alive; silence for 5 s ends its requests."""

    refused: dict[str, int] = {}  # requests by tenant, refused since the last ping because the waiting set was full


class Drain(Message, frozen=True):
    """Refuse new requests of every front end; what runs goes on."""


class Goodbye(Message, frozen=True):
    pass


ToEngine = Hello | AddRequest | Cancel | CloseSession | Ping | Drain | Goodbye


# --- engine → front end ---------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine resolved when it loaded the model. Memory in bytes."""

    pid: int
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
    activation_bytes: int
    kv_cache_bytes: int
    enable_prefix_caching: bool
    load_seconds: float
    num_host_blocks: int = 0  # of the host tier
    swap_seconds_per_block: float | None = None  # of one copy in one direction; None: no host tier
    graph_bytes: int = 0  # of CUDA graphs
    stage_seconds: dict[str, float] = {}  # how the time of the load was spent, in order
    async_scheduling: bool = False  # a step is launched before the tokens of the last are read
    tenants: dict[str, TenantLimits] = {}  # that the operator has configured

    @property
    def num_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output of one request at most. The last token is never cached."""
        return min(self.max_model_len, self.num_cache_tokens + 1)

    @property
    def max_concurrency(self) -> float:
        """Full-length requests that fit the cache at once."""
        return self.num_cache_tokens / self.max_model_len


class Ready(Message, frozen=True):
    info: EngineInfo


class Failed(Message, frozen=True):
    """The engine refuses this front end, or could not load its model. Final."""

    message: str


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `TidewheelError` on its way: `errors.from_wire(tag, message, retry_after_ms)`."""

    tag: str
    message: str
    retry_after_ms: int | None = None
    is_waiting_set_full: bool = False  # it can be sent again as soon as another request has started


class Dropped(Message, frozen=True):
    """All requests of this front end are over, with the error, and the engine knows it no longer: the last message
    of an engine that ends, or the answer to a front end that it counts as gone. `Hello` starts anew."""

    error: ErrorInfo


class RequestStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of one sequence, sent with its last delta. Times in ns of the monotonic clock; 0: never happened."""

    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_cached_tokens: int = 0
    num_reused_blocks: int = 0
    num_new_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0  # the class that was granted, 1 to 4
    arrival_ns: int = 0  # filled in by the front end, which took the time


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News of one request: new tokens, the end, or both."""

    key: int
    token_ids: list[int]
    finish_reason: str = ""  # a `FinishReason`; empty while it goes on
    error: ErrorInfo | None = None  # with finish_reason "error"
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    stats: RequestStats | None = None
    index: int = 0  # of the sequence, with `n` over 1; each has a last delta, unless one is of the `WHOLE_REQUEST`


class Deltas(Message, frozen=True):
    deltas: list[Delta]


class Stats(Message, frozen=True):
    stats: EngineStats


class Room(Message, WaitingRoom, frozen=True):
    """Sent when the room in the waiting set changes, so that a front end refuses at once what the engine would refuse
    after its step."""

    received: list[int]  # keys of this front end's requests that it has heard of since the last time


FromEngine = Ready | Failed | Dropped | Deltas | Stats | Room

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
