import enum
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tidewheel.errors import TidewheelError
from tidewheel.grammar import RowGrammar
from tidewheel.lora import Lora
from tidewheel.sampling import LogitBias, SamplingParams, TopLogprobs


class Priority(enum.IntEnum):
    """QoS classes, best first."""

    CRITICAL = 1
    HIGH = 2
    NORMAL = 3
    LOW = 4

    @classmethod
    def from_wire(cls, value: object) -> "Priority":
        """Return the class of a number or a name in any case; 0 means NORMAL. Raise `KeyError` for others."""
        return _BY_TEXT[str(value).strip().removesuffix(".0").upper()]

    def lifted(self) -> "Priority":
        return self if self <= Priority.HIGH else Priority(self - 1)

    def dropped(self) -> "Priority":
        return Priority(min(self + 1, Priority.LOW))


_BY_TEXT = {"0": Priority.NORMAL} | {text: one for one in Priority for text in (str(one.value), one.name)}


WeightsUsed = Literal["full", "quantized", "mixed"]
Pooling = Literal["", "last", "mean"]  # hidden states of an embedding; empty: none is asked for


FULL, QUANTIZED = 1, 2  # bits of the weights that computed a request


class RequestObjective(NamedTuple):
    """Times in seconds that a request asks for."""

    ttft_s: float = math.inf  # arrival to first token
    tpot_s: float = math.inf  # mean time of each later token
    refuses: bool = False  # what a predicted miss does: refuse the request, or lower its class

    @classmethod
    def of(cls, ttft_s: float | None, tpot_s: float | None, refuses: bool = False) -> "RequestObjective | None":
        """Return the objective; None without a time."""
        objective = cls(math.inf if ttft_s is None else ttft_s, math.inf if tpot_s is None else tpot_s, refuses)
        return None if objective[:2] == (math.inf, math.inf) else objective


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


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Request:
    """Identity, limits and progress of one of a client's `n` sequences, owned by the scheduler once added.

    While it runs, counters and latest tokens are in the scheduler's columns at `row`. Times are monotonic seconds.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]  # [num_prompt_tokens], read only
    sampling: SamplingParams
    _: KW_ONLY
    max_tokens: int  # prompt + max_tokens fits max_model_len
    arrival_time: float
    seed: int = 0
    priority: Priority = Priority.NORMAL  # requested class, lowered to the granted one at admission
    stop_token_ids: tuple[int, ...] = ()  # of the client, and end-of-sequence ids unless ignore_eos
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: LogitBias | None = None  # in place of the biases of `sampling`
    grammar: RowGrammar | None = None
    cache_salt: str = ""  # with the adapter's version: adapters share no blocks
    lora: Lora | None = None  # adapter; None: the base model
    pooling: Pooling = ""
    tenant: str = ""
    deadline: float | None = None  # ends the request in any state
    soft_deadline: float | None = None  # drops the request one class
    objective: RequestObjective | None = None
    session_id: str = ""  # unique per tenant
    session_ttl: float = 0.0  # seconds that the session's blocks outlive the end
    bucket: str = ""  # of a request without text: only requests of one bucket share a step
    inputs: Mapping[str, npt.NDArray[Any]] | None = None  # until a one-shot request runs, or to the end
    step_options: Any = None  # `StepOptions` of a model that takes many steps
    encoder_tokens: int = 0  # positions that an encoder computes of `inputs`, unless they are cached
    leader: "Request | None" = None  # first of `n` requests with one prompt; the others fork its prompt blocks

    num_prompt_tokens: int = field(init=False)

    # Order of service
    service_class: Priority = field(init=False)  # `priority`, lifted by age or dropped
    predicted_output_tokens: float = field(init=False)
    sequence: int = field(default=-1, init=False)  # arrival number, breaks ties
    rank: tuple[float, ...] = field(default=(), init=False)  # place in the order of the policy
    ages_since: float | None = field(default=None, init=False)  # start, or last lift, of ageing; None: it is over
    latest_start: float = field(default=math.inf, init=False)  # that meets `ttft_s`, as predicted at admission
    is_demoted: bool = field(default=False, init=False)  # its objective counts no more
    was_over_quota: bool = field(default=False, init=False)  # dropped one class for the quota of its tenant
    reserved_tokens: int = field(default=0, init=False)  # taken from the tenant's rate; settled at the end
    followers: "list[Request]" = field(default_factory=list, init=False)  # wait until this leader computed the prompt

    # Progress
    state: RequestState = field(default=RequestState.WAITING, init=False)
    row: int = field(default=-1, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list, init=False)  # of tokens 1, 2, …; so far
    pooled: npt.NDArray[np.float32] | None = field(default=None, init=False)  # [hidden_size], so far; a sum
    outputs: Mapping[str, npt.NDArray[Any]] | None = field(default=None, init=False)  # not text; taken when sent
    progress: Any = field(default=None, init=False)  # `Progress` of a model that takes many steps
    has_sent_prompt: bool = field(default=False, init=False)  # its log-probabilities
    block_hashes: list[bytes] = field(default_factory=list, init=False)  # digests of full blocks, extended on demand
    num_preemptions: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens cached at the start
    num_draft_tokens: int = field(default=0, init=False)
    num_accepted_draft_tokens: int = field(default=0, init=False)  # of num_draft_tokens
    keeps_full_weights: bool = field(default=False, init=False)  # in its steps; set when it begins to wait
    has_quantized_hashes: bool = field(default=False, init=False)  # `block_hashes` are of quantised weights
    num_reused_blocks: int = field(default=0, init=False)
    num_new_blocks: int = field(default=0, init=False)
    variants_used: int = field(default=0, init=False)  # `FULL` | `QUANTIZED`, by steps and cached tokens
    first_scheduled_time: float | None = field(default=None, init=False)
    first_token_time: float | None = field(default=None, init=False)
    last_token_time: float | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | None = field(default=None, init=False)  # stop token that ended the request
    error: TidewheelError | None = field(default=None, init=False)  # set with FinishReason.ERROR

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.service_class = self.priority
        self.predicted_output_tokens = float(self.max_tokens)

    @property
    def scores_prompt(self) -> bool:
        """Return whether prompt log-probabilities are left to compute; false for followers."""
        is_asked = self.sampling.prompt_logprobs is not None and self.leader is None
        return is_asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def needs_all_states(self) -> bool:
        """Return whether the prompt must be computed without cached blocks."""
        return self.scores_prompt or self.pooling == "mean"

    def pool(self, start: int, states: npt.NDArray[np.float32]) -> None:
        """Add a prompt chunk's pooled states [hidden_size] to the embedding's sum; `start` 0 begins a new sum."""
        self.pooled = states if start == 0 or self.pooled is None else self.pooled + states

    @property
    def row_sampling(self) -> SamplingParams:
        """Return the sampling parameters, with `prompt_logprobs` only while `scores_prompt`."""
        sampling = self.sampling
        if sampling.prompt_logprobs is None or self.scores_prompt:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    @property
    def is_new(self) -> bool:
        """Return whether neither request nor leader has run. Only new requests are evicted."""
        leader = self.leader
        return self.first_scheduled_time is None and (leader is None or leader.first_scheduled_time is None)

    @property
    def meets_objective(self) -> bool:
        """Return whether the request ended within the times of its objective; true without one."""
        first, last, objective = self.first_token_time, self.last_token_time, self.objective or RequestObjective()
        if self.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or first is None or last is None:
            return False
        is_started_in_time = first - self.arrival_time <= objective.ttft_s
        return is_started_in_time and last - first <= objective.tpot_s * max(self.num_output_tokens - 1, 1)

    @property
    def weights_used(self) -> WeightsUsed:
        return ("full", "full", "quantized", "mixed")[self.variants_used]

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}/{self.max_tokens}, row={self.row})"
        )
