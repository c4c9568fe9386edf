"""Messages of front ends and engine: msgspec structs over a ZeroMQ ipc socket.

`EngineReady` or `EngineFailure` answers `Hello`. `Deltas` answer a request by its `key` until each sequence has a
finish reason; `Disconnection` ends all requests of a front end. `Drain`, `ListRequests` and `CancelRequest` need no
`Hello`: only the server's user may open the socket.
"""

from typing import Annotated

import msgspec
import numpy as np

from tidewheel.batch import Int32Array, Int64Array
from tidewheel.errors import Busy, InternalError, TidewheelError, WaitingSetFull, from_wire
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import StepOptions
from tidewheel.request import FinishReason, Pooling, Request, WeightsUsed
from tidewheel.request_options import RequestOptions
from tidewheel.runner.info import RunnerInfo
from tidewheel.sampling import SamplingParams, TopLogprobs
from tidewheel.settings import shown_bytes
from tidewheel.stats import EngineStats, WaitingRoom
from tidewheel.tenants import TenantLimits

PROTOCOL = 19
QUEUE_LIMIT = 1 << 16  # messages per socket and direction
RETRY_AFTER_MS = 1000  # without an engine
WHOLE_REQUEST = -1  # index of all sequences
MAX_LISTED = 1000
MAX_REQUEST_ID_CHARS = 128  # longer ones are cut

Key = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]  # sums stay within 64 bits


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class Hello(Message, frozen=True):
    """First message of a front end. Its settings replace the engine's if its `read_ns` is later."""

    protocol: int
    client: str  # unique name
    identity: str  # of the engine; empty: any
    settings: dict[str, object] = {}
    read_ns: int = 0  # monotonic clock; 0: keeps the settings


class AddRequest(Message, frozen=True):
    key: Key
    prompt: bytes  # int32 little endian token ids
    sampling: SamplingParams  # without `stop`, `bad_words`, `logit_bias` and `grammar`
    stop_token_ids: tuple[int, ...] = ()  # with end-of-sequence ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    options: RequestOptions = RequestOptions()  # a delta of "stop", or an error, answers an `order`
    arrival_ns: int = 0  # monotonic clock
    deadline_ns: int = 0  # 0: none
    soft_deadline_ns: int = 0
    bias_token_ids: bytes = b""  # from `LogitBias.to_bytes`
    bias_amounts: bytes = b""
    pooling: Pooling = ""
    grammar: str = ""  # accepted by a compiler; empty: none
    grammar_name: str = ""  # its parameter, for messages
    end_token_ids: tuple[int, ...] = ()  # those that only the grammar's end allows
    request_id: str = ""  # the client's
    inputs: PackedTensors | None = None  # of a request without text; `prompt` has a 0 for each item; may lack data
    step_options: StepOptions | None = None  # of a model that takes many steps


class BatchDone(Message, frozen=True):
    """Answer to `Deltas.to_run`, request by request, in any order."""

    ends: "list[tuple[Key, ErrorInfo | None]]"


class Cancel(Message, frozen=True):
    sequences: list[tuple[int, int]]  # (key, index or `WHOLE_REQUEST`)


class Ping(Message, frozen=True):
    """Sign of life of a front end, sent every second. After 5 s of silence, its requests end."""

    refused: dict[str, _Count] = {}  # since the last ping, by tenant


class Drain(Message, frozen=True):
    """Order to refuse new requests, passed on to front ends. Answered by `Stats`."""


class Goodbye(Message, frozen=True):
    pass


class ListRequests(Message, frozen=True):
    """Question answered by `RequestList`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class CancelRequest(Message, frozen=True):
    """Order to end a request of any front end. Answered by `CancelReply`."""

    pid: int  # from `RequestList`; a later engine ignores the order
    number: Key


ToEngine = Hello | AddRequest | BatchDone | Cancel | Ping | Drain | Goodbye | ListRequests | CancelRequest


class EngineInfo(RunnerInfo, frozen=True, kw_only=True):
    pid: int
    enable_prefix_caching: bool
    max_logprobs: int = 20
    async_scheduling: bool = False
    tenants: dict[str, TenantLimits] = msgspec.field(default_factory=dict)

    @property
    def num_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of prompt and output together. The last token is never cached."""
        return min(self.max_model_len, self.num_cache_tokens + 1)

    def describe(self) -> list[str]:
        """Return lines for the log and the console."""
        if self.signature is not None:
            tensors = (*self.signature.inputs, *self.signature.outputs)
            kind = "one-shot" if self.offer is None else "many steps"
            loaded = f"model: {kind} by {self.architecture} on {self.device}, loaded in {self.load_seconds:.1f} s"
            shown = ", ".join(spec.describe() for spec in tensors)
            return [loaded, f"batches of at most {self.max_num_batched_tokens}: {shown}"]
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stage_seconds.items())
        named = {
            "weights": self.weights_bytes, "of these a quantised copy": self.copy_bytes,
            "slots of adapters": self.lora_bytes, "activations": self.activation_bytes, "graphs": self.graph_bytes,
        }  # fmt: skip
        memory = ", ".join(f"{name} {shown_bytes(size)}" for name, size in named.items() if size)
        form = f", in {self.kv_cache_dtype}" if self.kv_cache_dtype else ""
        source = f"; sized by {self.cache_source}" if self.cache_source else ""
        path = "native" if self.is_native else "through transformers"
        swap_ms = 1e3 * (self.swap_seconds_per_block or 0.0)
        return [
            f"model: {self.architecture}, {self.dtype}, on {self.device}, {path}; "
            f"loaded in {self.load_seconds:.1f} s" + (f" ({stages})" if stages else ""),
            f"memory: {memory}",
            f"KV cache {shown_bytes(self.kv_cache_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens"
            f"{form}{source}",
            f"{'CPU' if self.device.startswith('cpu') else 'GPU'} KV cache size: {self.num_cache_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: "
            f"{self.num_cache_tokens / self.max_model_len:.2f}x",
            *filter(None, [self.shortened]),
            f"async scheduling: {'on' if self.async_scheduling else 'off'}",
            *([f"host tier: {self.num_host_blocks:,} blocks, {swap_ms:.3f} ms to copy one"] if swap_ms else []),
        ]


class EngineReady(Message, frozen=True):
    info: EngineInfo


class EngineFailure(Message, frozen=True):
    message: str
    is_permanent: bool = False


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    tag: str
    message: str
    retry_after_ms: int | None = None
    is_waiting_set_full: bool = False  # until another request starts

    @classmethod
    def of(cls, error: TidewheelError) -> "ErrorInfo":
        return cls(error.tag, error.message, error.retry_after_ms, isinstance(error, WaitingSetFull))

    def to_error(self) -> TidewheelError:
        return from_wire(self.tag, self.message, self.retry_after_ms)


class Disconnection(Message, frozen=True):
    error: ErrorInfo


class RequestStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Stage times (monotonic; 0: never) and counts of one ended sequence."""

    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_cached_tokens: int = 0
    num_reused_blocks: int = 0
    num_new_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0  # granted class
    arrival_ns: int = 0
    weights: WeightsUsed = "full"
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> "RequestStats":
        return cls(
            first_scheduled_ns=_ns(request.first_scheduled_time),
            first_token_ns=_ns(request.first_token_time),
            last_token_ns=_ns(request.last_token_time),
            num_cached_tokens=request.num_cached_tokens,
            num_reused_blocks=request.num_reused_blocks,
            num_new_blocks=request.num_new_blocks,
            num_preemptions=request.num_preemptions,
            priority=int(request.priority),
            weights=request.weights_used,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_draft_tokens=request.num_accepted_draft_tokens,
        )


def _unsent_prompt_logprobs(request: Request) -> list[TopLogprobs] | None:
    """Return the prompt's log-probabilities at the first call, then None."""
    if request.has_sent_prompt or request.leader is not None or request.sampling.prompt_logprobs is None:
        return None
    request.has_sent_prompt = True
    return request.prompt_logprobs


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: int
    token_ids: list[int]
    finish_reason: str = ""  # empty before the end
    error: ErrorInfo | None = None
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    stats: RequestStats | None = None
    index: int = 0  # of the sequence, or `WHOLE_REQUEST`
    prompt_logprobs: list[TopLogprobs] | None = None  # of the prompt without its first token; once
    pooled: bytes = b""  # float32 little endian, with an embedding's end
    outputs: PackedTensors | None = None  # of a request without text: at the end, and previews
    answer: str = ""  # JSON text of an order

    @classmethod
    def of(
        cls, key: int, index: int, request: Request, token_ids: list[int], logprobs: list[TopLogprobs] | None = None
    ) -> "Delta":
        """Return new tokens of a sequence with its result, or, if shared memory has room, with a preview."""
        prompt = _unsent_prompt_logprobs(request)
        if request.finish_reason is None and request.outputs is None:  # of each row in each step: 0.3 us
            return cls(key, token_ids, "", None, logprobs, None, index, prompt)
        is_last = request.finish_reason is not None
        if request.finish_reason is FinishReason.DEADLINE and request.progress is not None:
            request.outputs = request.progress.deadline_outputs()
        error, arrays, outputs = request.error if is_last else None, request.outputs, None
        request.outputs = None
        try:
            outputs = None if arrays is None else PackedTensors.of(arrays, is_result=True)
        except Busy as full:
            error = full if is_last else None
        if error is None and request.finish_reason is FinishReason.ERROR:
            error = InternalError("the request ended with an error that left no message")
        return cls(
            key,
            token_ids,
            finish_reason=str(request.finish_reason or ""),
            error=None if error is None else ErrorInfo.of(error),
            logprobs=logprobs,
            stats=RequestStats.of(request) if is_last else None,
            index=index,
            prompt_logprobs=prompt,
            pooled=b"" if request.pooled is None or not is_last else request.pooled.astype("<f4").tobytes(),
            outputs=outputs,
        )


class NewTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One new token per key, of unfinished requests with one sequence and no log-probabilities."""

    keys: bytes  # int64 little endian
    token_ids: bytes  # int32 little endian

    @classmethod
    def of(cls, keys: Int64Array, token_ids: Int32Array) -> "NewTokens":
        return cls(keys.astype("<i8", copy=False).tobytes(), token_ids.astype("<i4", copy=False).tobytes())

    def arrays(self) -> tuple[Int64Array, Int32Array]:
        return np.frombuffer(self.keys, "<i8"), np.frombuffer(self.token_ids, "<i4")


class Deltas(Message, frozen=True):
    """Output of one or more steps. For the same request, `tokens` precede `deltas`."""

    tokens: list[NewTokens]
    deltas: list[Delta]
    to_run: list[int] = []  # keys of requests whose tensors stayed in the front end, which runs them now


class Stats(Message, frozen=True):
    stats: EngineStats


class Room(Message, WaitingRoom, frozen=True):
    """Fill of the engine's waiting set, sent when it changes, so that front ends can refuse requests at once."""

    received: list[int]  # since the last `Room`


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unfinished request. Times are seconds since arrival; counts, but the prompt's, are sums over sequences."""

    number: int
    request_id: str  # the client's
    tenant: str
    priority: str  # granted class
    state: str  # waiting, running or preempted: the first sequence's
    age_s: float
    waited_s: float  # until the first step or now
    first_token_s: float | None
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class RequestList(Message, frozen=True):
    pid: int
    rows: list[RequestRow]  # the oldest
    num_sequences: int  # unfinished


class CancelReply(Message, frozen=True):
    was_there: bool


FromEngine = EngineReady | EngineFailure | Disconnection | Deltas | Stats | Room | Drain | RequestList | CancelReply

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else int(seconds * 1e9)
