"""Request as scheduler and engine see it: token ids in, token ids out."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.batch import Int32Array
    from tidewheel.errors import TidewheelError
    from tidewheel.sampling import LogitBias, SamplingParams


class Priority(enum.IntEnum):
    """QoS classes, best first. On the wire 0 means NORMAL, because 0 is Triton's default."""

    CRITICAL = 1
    HIGH = 2
    NORMAL = 3
    LOW = 4

    @classmethod
    def from_wire(cls, value: int) -> Priority:
        """Return the class. Raise `ValueError` for values outside 0…4."""
        return cls.NORMAL if value == 0 else cls(value)


class RequestState(enum.Enum):
    """WAITING → RUNNING → FINISHED; RUNNING ⇄ PREEMPTED; any → FINISHED by cancel or error."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end-of-sequence or stop token, or stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Request:
    """Identity, limits and progress of one request, owned by the scheduler once added.

    While a request runs, its counters and newest tokens live in the scheduler's columns at `row`. They are written
    back when it leaves the row.
    """

    __slots__ = (
        "arrival_time", "bad_words_ids", "block_hashes", "cache_salt", "deadline", "error", "finish_reason",
        "first_scheduled_time", "first_token_time", "followers", "last_token_time", "leader", "lift_time",
        "logit_bias", "max_tokens", "num_cached_tokens", "num_new_blocks", "num_preemptions", "num_reused_blocks",
        "output_token_ids", "predicted_output_tokens", "priority", "prompt_token_ids", "rank", "request_id",
        "reserved_tokens", "row", "sampling", "seed", "sequence", "service_class", "session_id",
        "session_ttl", "soft_deadline", "state", "stop_reason", "stop_token_ids", "tenant",
        "was_over_quota",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Int32Array,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        arrival_time: float,
        seed: int = 0,
        priority: Priority = Priority.NORMAL,
        stop_token_ids: tuple[int, ...] = (),
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        logit_bias: LogitBias | None = None,
        cache_salt: str = "",
        tenant: str = "",
        deadline: float | None = None,
        soft_deadline: float | None = None,
        session_id: str = "",
        session_ttl: float = 0.0,
        leader: Request | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids  # int32 [num_prompt_tokens], read only
        self.sampling = sampling
        self.max_tokens = max_tokens  # prompt + max_tokens fits max_model_len
        self.arrival_time = arrival_time  # seconds, monotonic clock of the caller
        self.seed = seed
        self.priority = priority  # requested class, lowered to the granted one at admission
        self.stop_token_ids = stop_token_ids  # end-of-sequence ids unless ignore_eos, and those of the client
        self.bad_words_ids = bad_words_ids
        self.logit_bias = logit_bias  # replaces that of `sampling`; None: no replacement
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.deadline = deadline  # seconds, same clock: the request ends then in any state; None: never
        self.soft_deadline = soft_deadline  # drops the request one class
        self.session_id = session_id  # unique per tenant; blocks are kept for `session_ttl` seconds after the end
        self.session_ttl = session_ttl
        self.leader = leader  # first of `n` requests with one prompt; the others fork its prompt blocks

        self.service_class = priority  # current class: `priority`, lifted by age or dropped
        self.predicted_output_tokens = float(max_tokens)
        self.reserved_tokens = 0  # taken from the tenant's rate; settled at the end
        self.state = RequestState.WAITING
        self.sequence = -1  # arrival number, breaks ties
        self.rank: tuple[float, ...] = ()  # place in the order of the policy
        self.lift_time: float | None = None  # when ageing lifts the class
        self.was_over_quota = False  # dropped one class for the quota of its tenant
        self.followers: list[Request] = []  # requests that wait until this leader has computed the prompt
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None  # stop token that ended the request
        self.error: TidewheelError | None = None  # set with FinishReason.ERROR
        self.output_token_ids: list[int] = []
        self.row = -1
        self.block_hashes: list[bytes] = []  # chained digests of full blocks, extended as the request grows
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prompt tokens cached at first admission
        self.num_reused_blocks = 0
        self.num_new_blocks = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def row_sampling(self) -> SamplingParams:
        """Sampling parameters with biases, built per row so that refused requests cost nothing."""
        return self.sampling if self.logit_bias is None else replace(self.sampling, logit_bias=self.logit_bias)

    @property
    def has_begun(self) -> bool:
        """True once the request or its leader has had a row; it is never evicted afterwards."""
        leads = self.leader is not None and self.leader.first_scheduled_time is not None
        return leads or self.first_scheduled_time is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens, prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens}, row={self.row})"
        )
