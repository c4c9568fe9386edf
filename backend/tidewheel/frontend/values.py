"""What crosses the border between front end and adapter: a generation asked for, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidewheel.batch import Int32Array
    from tidewheel.errors import TidewheelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Parameters as one carrier brought them; `origin` is how an error names it ("sampling_parameters",
    "request parameter", "input tensor")."""

    origin: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, exactly one of text, ids or messages; parameters not yet checked."""

    request_id: str = ""
    text: str | bytes | None = None  # bytes are checked for UTF-8
    input_ids: Int32Array | None = None  # [num_prompt_tokens]
    messages: str | bytes | None = None  # JSON list of chat messages
    parameters: tuple[ParameterSource, ...] = ()
    stream: bool = False
    echo: bool = False  # the prompt precedes the output text (not when streaming)
    arrival_ns: int = 0  # monotonic
    timeout_us: int = 0  # a deadline as Triton's own request field gives it; 0: none

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt as it came; of a `str`, at least."""
        ids = 0 if self.input_ids is None else self.input_ids.nbytes
        return len(self.text or "") + len(self.messages or "") + ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One new token: `entries` maps token id to (logprob, rank, decoded token), the chosen one first."""

    token_id: int
    entries: dict[int, tuple[float, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """Figures of one sequence: times in ns of the monotonic clock, 0 for what never happened; blocks; its class."""

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    num_reused_blocks: int
    num_new_blocks: int
    priority: int  # the class that was granted


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is new of one sequence since the last response."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # aligned with token_ids, when asked
    cumulative_logprob: float | None = None  # over all output so far, when asked
    num_input_tokens: int = 0
    finish_reason: str | None = None  # from the sequence's end on, in every response
    perf: PerfMetrics | None = None  # from the end on


Response = Sequence[Chunk]  # one for each of the request's `n` sequences, by index


def is_last(response: Response) -> bool:
    """Whether a response ends its request: all sequences have ended."""
    return all(chunk.finish_reason is not None for chunk in response)


class Sink(Protocol):
    """Where the responses of one request go. Called from one thread at a time; exactly one call ends it:
    `send` of the last response, or `fail`."""

    def send(self, response: Response) -> None: ...

    def fail(self, error: TidewheelError) -> None: ...

    def is_cancelled(self) -> bool: ...
